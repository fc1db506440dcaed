"""Handwritten digits: 1797 real 8x8 images that are part of scikit-learn. Nothing is downloaded.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI repository 1998 (its test
part). The images are divided into `num_folds` fixed folds, class by class, so every fold has nearly the same share
of each class. A run uses one fold as its test set. Over all folds every image is tested exactly once.
"""

import random
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

NUM_CLASSES = 10
# Mean and standard deviation of a pixel, in units of the full scale 16, over all images.
MEAN, STD = 0.3053, 0.3761


def stratified_folds(labels: list[int], num_folds: int, seed: int = 0) -> list[list[int]]:
    """Divides the indices of `labels` into folds. The counts of a class differ by at most one between folds."""
    shuffle = random.Random(seed).shuffle
    folds: list[list[int]] = [[] for _ in range(num_folds)]
    dealt = 0
    for label in sorted(set(labels)):
        members = [index for index, other in enumerate(labels) if other == label]
        shuffle(members)
        for member in members:
            folds[dealt % num_folds].append(member)
            dealt += 1
    return [sorted(fold) for fold in folds]


def read_table() -> np.ndarray:
    """64 pixels from 0 to 16 and the label of each image, float64 [1797, 65].

    They are read from the file inside of scikit-learn, since importing scikit-learn takes a second.
    """
    package = find_spec("sklearn")
    if package is None or package.submodule_search_locations is None:
        raise ModuleNotFoundError("the digits are part of scikit-learn, which is not installed", name="sklearn")
    folder = Path(package.submodule_search_locations[0])
    return np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=",")


class Digits(dict[str, Dataset[tuple[Tensor, ...]]]):
    """{'train', 'test'}: items are (image float32 [1, 8, 8], label int64 []).

    Args:
        fold: index of the fold that is the test set, counted from 0.
        num_folds: number of folds, 2 to 10.
        num_classes: 10. A config can pass it on to the model.
    """

    def __init__(self, fold: int = 0, num_folds: int = 5, num_classes: int = NUM_CLASSES) -> None:
        if num_classes != NUM_CLASSES:
            raise ValueError(f"digits has {NUM_CLASSES} classes; dataset.num_classes is {num_classes}")
        if not 2 <= num_folds <= 10:
            raise ValueError(f"dataset.num_folds is {num_folds}; it must be from 2 to 10")
        if not 0 <= fold < num_folds:
            raise ValueError(
                f"dataset.fold is {fold}; with {num_folds} folds it must be from 0 to {num_folds - 1}"
            )
        table = torch.from_numpy(read_table())
        images = (table[:, :-1].float() / 16 - MEAN) / STD
        images = images.view(-1, 1, 8, 8)
        labels = table[:, -1].long()
        folds = stratified_folds(labels.tolist(), num_folds)
        train = [index for other, members in enumerate(folds) if other != fold for index in members]
        super().__init__(
            train=TensorDataset(images[train], labels[train]),
            test=TensorDataset(images[folds[fold]], labels[folds[fold]]),
        )
