"""Common parts of the image data sets: images in memory or in files, and transforms for training and testing."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

# A transform takes a PIL image and returns a float32 tensor [3, height, width].
Transform = Callable[[Any], Any]


class ArrayImages(Dataset[Any]):
    """Images in memory: pixels uint8 [n, height, width, 3] and labels [n]."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, transform: Transform) -> None:
        self.pixels = pixels
        self.labels = labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.pixels[index])), int(self.labels[index])


class ImageFiles(Dataset[Any]):
    """Images in files, given as (path, label). A file is opened when its image is needed."""

    def __init__(self, samples: list[tuple[str, int]], transform: Transform) -> None:
        self.samples = samples
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        return self.transform(read_image(path)), label


def read_image(path: str) -> Any:
    """Reads an RGB image with PIL. Raises ValueError, with its path, if it cannot be read or decoded."""
    from PIL import Image

    try:
        with open(path, "rb") as file, Image.open(file) as image:
            return image.convert("RGB")
    # PIL raises many exceptions for damaged files: OSError, SyntaxError, struct.error, ValueError.
    except Exception as error:
        raise ValueError(f"the image {path} cannot be read: {error}") from error


def normalized(steps: list[Transform], mean: tuple[float, ...], std: tuple[float, ...]) -> Transform:
    """Applies `steps` to a PIL image, converts it to a tensor and normalizes each channel by `mean` and `std`."""
    from torchvision import transforms

    composed: Transform = transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize(mean, std)])
    return composed


def held_out(labels: Sequence[int], ratio: float | None) -> list[int]:
    """Indices of the training images that are held out for validation, equal in every run.

    Of each class a share of `ratio` (between 0 and 1) is held out, and at least one image. If `ratio` is None, no
    image is held out.
    """
    if ratio is None:
        return []
    if not 0 < ratio < 1:
        raise ValueError(f"dataset.val_ratio is {ratio}; it must be between 0 and 1, or null")
    members: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        members.setdefault(label, []).append(index)
    draw = random.Random(0)
    return sorted(index for own in members.values() for index in draw.sample(own, max(1, round(ratio * len(own)))))
