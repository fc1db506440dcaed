"""Value formats of a payload. What a format rounds away stays in the sender's error state."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CastValues:
    """Values as fp32, fp16 or bf16. Magnitudes beyond the format's range are cut to its largest number."""

    dtype: torch.dtype = torch.float32

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def quantize(self, values: Tensor, summands: int = 1) -> Tensor:
        """fp32 values -> values of the wire's dtype, same shape.

        Where the wire itself adds `summands` of them, they are cut so far that the sum stays in range, with a
        factor of 2 for its rounding.
        """
        if self.dtype == torch.float32:
            return values
        limit = torch.finfo(self.dtype).max / (1 if summands == 1 else 2 * summands)
        return values.clamp(-limit, limit).to(self.dtype)
