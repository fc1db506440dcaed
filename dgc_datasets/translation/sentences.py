"""Tokens of many sentences in two arrays, which all ranks of a machine map from the same files."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass
class Sentences:
    """Sentences of tokens.

    Args:
        tokens: int32 [sum of the lengths], sentence after sentence.
        offsets: int64 [sentences + 1], where each sentence begins, and the end.
    """

    tokens: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def lengths(self) -> np.ndarray:
        """Tokens of each sentence, int64 [sentences]."""
        return np.diff(self.offsets)

    def save(self, path: Path) -> None:
        """Writes the files `path`.tokens.npy and `path`.offsets.npy."""
        np.save(f"{path}.tokens.npy", self.tokens)
        np.save(f"{path}.offsets.npy", self.offsets)

    @classmethod
    def load(cls, path: Path) -> "Sentences":
        """Maps what `save` has written."""
        return cls(np.load(f"{path}.tokens.npy", mmap_mode="r"), np.load(f"{path}.offsets.npy"))

    @classmethod
    def of(cls, batches: Iterable[list[list[int]]]) -> "Sentences":
        """The sentences of all batches. Only one batch is in memory as lists."""
        tokens, lengths = [np.zeros(0, np.int32)], [np.zeros(1, np.int64)]
        for batch in batches:
            tokens.append(np.array([token for sentence in batch for token in sentence], np.int32))
            lengths.append(np.array([len(sentence) for sentence in batch], np.int64))
        return cls(np.concatenate(tokens), np.cumsum(np.concatenate(lengths)))
