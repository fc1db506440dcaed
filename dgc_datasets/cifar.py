"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) from their Python files, with the usual crops and flips.

    ROOT/cifar-10-batches-py/{data_batch_1, ..., data_batch_5, test_batch}     10 classes
    ROOT/cifar-100-python/{train, test}                                       100 classes

If the folder does not exist and its archive (cifar-10-python.tar.gz) is in ROOT, one process per machine unpacks
it. With `download` the archive is fetched first. A file with the official number of images must also have the
official checksum. Files of other sizes are accepted as a custom data set in the same format.
"""

import hashlib
import io
import pickle
import urllib.error
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from dgc_datasets.images import ArrayImages, held_out, normalized
from dgc_datasets.prepare import prepare_once, unpack

EDGE = 32
# Of CIFAR-10's training images, per channel.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
OFFICIAL_IMAGES = (10_000, 50_000)


class CIFAR(dict[str, Dataset[Any]]):
    """{'train', 'test'}, and 'val' with a val_ratio: items are (image float32 [3, size, size], label).

    Args:
        root: the folder that contains the data set's folder or archive.
        num_classes: 10 for CIFAR-10, 100 for CIFAR-100.
        image_size: test images are resized to it; training images are padded by 4 pixels and cropped to it.
        val_ratio: the share of the training images that is held out for validation.

    Raises:
        ValueError: with a remedy, for missing or damaged files.
    """

    def __init__(
        self,
        root: str = "data/cifar10",
        num_classes: int = 10,
        image_size: int = EDGE,
        val_ratio: float | None = None,
        download: bool = False,
    ) -> None:
        from torchvision import datasets, transforms  # slow to import, so only where it is used

        if num_classes not in (10, 100):
            raise ValueError(f"CIFAR has 10 or 100 classes; dataset.num_classes is {num_classes}")
        if not 1 <= image_size <= EDGE + 8:
            raise ValueError(f"dataset.image_size is {image_size}; it must be from 1 to {EDGE + 8}")
        source = datasets.CIFAR10 if num_classes == 10 else datasets.CIFAR100
        parts = {"train": source.train_list, "test": source.test_list}
        folder = Path(root).expanduser() / source.base_folder
        prepare(source, folder, [name for files in parts.values() for name, _ in files], download)
        crops = [transforms.RandomCrop(image_size, padding=4), transforms.RandomHorizontalFlip()]
        augmented = normalized(crops, MEAN, STD)
        plain = normalized([transforms.Resize(image_size)], MEAN, STD)
        pixels, labels = read(folder, parts["train"], num_classes)
        kept = held_out(labels.tolist(), val_ratio)
        train = np.setdiff1d(np.arange(len(labels)), kept)
        super().__init__(train=ArrayImages(pixels[train], labels[train], augmented))
        if kept:
            self["val"] = ArrayImages(pixels[kept], labels[kept], plain)
        self["test"] = ArrayImages(*read(folder, parts["test"], num_classes), plain)


def prepare(source: Any, folder: Path, names: list[str], download: bool) -> None:
    """Makes sure that all files are in `folder`. One process per machine does the work.

    `source` is torchvision's class, which has the archive's name, address and checksum.
    """
    archive = folder.parent / source.filename

    def is_ready() -> bool:
        return all((folder / name).is_file() for name in names)

    def work() -> None:
        fetch(source, archive, download)
        unpack(archive, folder.name)

    if download or archive.is_file():
        prepare_once(folder.parent, is_ready, work)
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(
                f"the data set is not there: {folder / name} is missing. Put the folder {folder.name} or its "
                f"archive {source.filename} ({source.url}) into {folder.parent}, name another place with "
                "--configs.dataset.root DIR, or download it with --configs.dataset.download true"
            )


def fetch(source: Any, archive: Path, download: bool) -> None:
    """Makes sure that the archive is complete. Downloads it if needed and allowed, otherwise raises ValueError."""
    from torchvision.datasets.utils import check_integrity, download_url

    if check_integrity(str(archive), source.tgz_md5):
        return
    if archive.is_file() and not download:
        raise ValueError(
            f"{archive} is damaged: it has not the checksum of {source.url}. Fetch it again, or set "
            "--configs.dataset.download true"
        )
    try:
        download_url(source.url, str(archive.parent), source.filename, source.tgz_md5)
    except (urllib.error.URLError, OSError, RuntimeError) as error:
        raise ValueError(
            f"{source.url} could not be downloaded to {archive.parent}: {error}. Fetch it by other means and "
            "put it there"
        ) from error


def read(folder: Path, files: list[list[str]], num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """(pixels uint8 [n, 32, 32, 3], labels [n]) of several files, each given as (name, official MD5), in order."""
    contents = [read_batch(folder / name, checksum, num_classes) for name, checksum in files]
    pixels = np.concatenate([pixels for pixels, _ in contents]).reshape(-1, 3, EDGE, EDGE)
    labels = np.array([label for _, labels in contents for label in labels])
    return np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)), labels


def read_batch(path: Path, checksum: str, num_classes: int) -> tuple[np.ndarray, list[int]]:
    """(pixels uint8 [n, 3072], labels) of one file. Raises ValueError, with its path, if it is damaged."""
    try:
        content = path.read_bytes()
        batch = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
        pixels = np.asarray(batch["data"])
        labels = [int(label) for label in batch["labels" if "labels" in batch else "fine_labels"]]
    # Damaged bytes can make the unpickler raise almost any exception.
    except Exception as error:
        raise ValueError(f"{path} cannot be read as a file of CIFAR: {_reason(error)}") from error
    expected = (len(labels), 3 * EDGE * EDGE)
    if pixels.shape != expected or pixels.dtype != np.uint8 or not labels:
        raise ValueError(
            f"{path} is damaged: it has {len(labels)} labels and pixels {pixels.dtype} {list(pixels.shape)}, "
            f"not uint8 {list(expected)}"
        )
    if not 0 <= min(labels) <= max(labels) < num_classes:
        raise ValueError(f"{path} is damaged: labels from {min(labels)} to {max(labels)} of {num_classes}")
    official = len(labels) in OFFICIAL_IMAGES
    if official and hashlib.md5(content, usedforsecurity=False).hexdigest() != checksum:
        raise ValueError(f"{path} is damaged: it has not the official file's checksum; fetch it again")
    return pixels, labels


class _ArraysOnly(pickle.Unpickler):
    """Unpickler for NumPy arrays and plain values only. An unrestricted pickle could run any code."""

    ARRAYS = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy._core.numeric")
    NAMES = ("ndarray", "dtype", "_reconstruct", "_frombuffer")

    def find_class(self, module: str, name: str) -> Any:
        of_arrays = module in self.ARRAYS and name in self.NAMES
        if not of_arrays and (module, name) != ("_codecs", "encode"):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
