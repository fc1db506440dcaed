"""Characters of the Python standard library's own sources. Nothing is downloaded.

The same version of Python gives the same data: files are sorted by name, and a hash of its name decides whether a
file is held out. Tests, tables of character codes and files of 200 kB or more are left out.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

LARGEST = 200_000  # bytes; larger files are tables
LEFT_OUT = ("test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages")
HOLD_OUT_EVERY = 20
UNKNOWN = 0  # id of the characters that are not in the vocabulary


def source_files(root: Path) -> Iterator[tuple[str, Path]]:
    """(relative name, path) of the files used, sorted by name."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith(("config-", "__"))]
        for name in names:
            # The build settings of this machine are named _sysconfigdata*.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder) / name
                if path.stat().st_size < LARGEST:
                    found.append((path.relative_to(root).as_posix(), path))
    yield from sorted(found)


def is_held_out(name: str) -> bool:
    """Whether a file belongs to the test data."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % HOLD_OUT_EVERY == 0


def to_codes(text: str) -> np.ndarray:
    """The Unicode code point of each character."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


class PythonSources(dict[str, Tensor]):
    """{'train', 'test'}: character ids, int64 [n]. Id 0 is any character outside of the vocabulary.

    Args:
        vocabulary_size: number of ids: the most frequent characters of the training data, and the unknown one.
        characters: training characters to use, from the first file on, and a 20th of that to test; None: all
            (about 8 million).

    Raises:
        ValueError: if this Python has no sources, or an argument is out of range.

    Example:
        tokens = PythonSources(vocabulary_size=128)["train"]
    """

    def __init__(self, vocabulary_size: int = 128, characters: int | None = None) -> None:
        if vocabulary_size < 2:
            raise ValueError(f"dataset.vocabulary_size is {vocabulary_size}; it must be at least 2")
        if characters is not None and characters < HOLD_OUT_EVERY:
            raise ValueError(f"dataset.characters is {characters}; it must be at least {HOLD_OUT_EVERY}")
        root = Path(sysconfig.get_paths()["stdlib"])
        parts: dict[bool, list[str]] = {False: [], True: []}
        for name, path in source_files(root):
            parts[is_held_out(name)].append(path.read_bytes().decode("utf-8", "replace"))
        if not all(parts.values()):
            raise ValueError(f"there are no Python sources in {root}: use a Python with its standard library")
        train, test = (to_codes("".join(parts[held_out])) for held_out in (False, True))
        if characters is not None:
            train, test = train[:characters], test[: characters // HOLD_OUT_EVERY]
        codes, counts = np.unique(train, return_counts=True)
        known = codes[np.lexsort((codes, -counts))][: vocabulary_size - 1]
        ids = np.full(0x110000, UNKNOWN, dtype=np.int64)
        ids[known] = np.arange(1, len(known) + 1)
        super().__init__(train=torch.from_numpy(ids[train]), test=torch.from_numpy(ids[test]))
