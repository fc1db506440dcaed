"""Small data sets in the on-disk formats of the real ones, for tests."""

import pickle
from pathlib import Path

import numpy as np
from PIL import Image

CIFAR10_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
FOLDERS = {10: "cifar-10-batches-py", 100: "cifar-100-python"}


def write_cifar(root: Path, num_classes: int = 10, train: int = 40, test: int = 16) -> Path:
    """Writes the files of CIFAR-10 or CIFAR-100, of noise around a grey that grows with the label."""
    folder = root / FOLDERS[num_classes]
    folder.mkdir(parents=True)
    if num_classes == 10:
        files = {**dict.fromkeys(CIFAR10_TRAIN, train // 5), "test_batch": test}
        meta, names = "batches.meta", "label_names"
    else:
        files, meta, names = {"train": train, "test": test}, "meta", "fine_label_names"
    random = np.random.default_rng(0)
    for name, count in files.items():
        labels = [i % num_classes for i in range(count)]
        grey = 255 * (np.array(labels)[:, None] + 0.5) / num_classes
        pixels = np.clip(grey + random.normal(0, 20, (count, 3072)), 0, 255).astype(np.uint8)
        content = {"batch_label": name, "data": pixels, "filenames": [f"{i}.png" for i in range(count)]}
        coarse = {"fine_labels": labels, "coarse_labels": [label // 5 for label in labels]}
        content |= {"labels": labels} if num_classes == 10 else coarse
        # the real ones were written by Python 2
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    words = [f"class {label}" for label in range(num_classes)]
    (folder / meta).write_bytes(pickle.dumps({names: words, "num_vis": 3072}, protocol=2))
    return folder


def write_imagenet(root: Path, classes: int = 4, train: int = 6, test: int = 3, edge: int = 48) -> Path:
    """Writes train/ and val/ with `classes` folders of so many JPEGs each; returns `root`."""
    random = np.random.default_rng(0)
    for split, count in (("train", train), ("val", test)):
        for label in range(classes):
            folder = root / split / f"n{1440764 + label:08d}"
            folder.mkdir(parents=True)
            for number in range(count):
                grey = 255 * (label + 0.5) / classes
                pixels = np.clip(grey + random.normal(0, 20, (edge, edge + number, 3)), 0, 255)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{folder.name}_{number}.JPEG")
    return root
