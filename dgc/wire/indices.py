"""Index formats of a payload."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PlainIndices:
    """Indices within the bucket, as int32 or int64."""

    dtype: torch.dtype = torch.int64

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def check(self, numel: int) -> None:
        """Raise where a bucket of `numel` elements has indices that this format cannot hold."""
        if numel - 1 > torch.iinfo(self.dtype).max:
            raise ValueError(f"a bucket of {numel} elements needs int64 indices: set int32_indices=False")

    def encode(self, indices: Tensor) -> Tensor:
        return indices.to(self.dtype)
