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

    def quantize(self, values: Tensor, summands: int = 1, result: torch.dtype = torch.float32) -> Tensor:
        """fp32 values -> values of the wire's dtype, same shape.

        Where the wire itself adds `summands` of them, they are cut so far that the sum stays in range, with a
        factor of 2 for its rounding. They are cut as well to the range of `result`, where the mean ends up.
        """
        wire, home = torch.finfo(self.dtype), torch.finfo(result)
        limit = wire.max / (1 if summands == 1 else 2 * summands)
        if home.max < wire.max:
            # a little less, so that rounding to the wire does not lift it above home.max
            limit = min(limit, home.max * (1 - wire.eps))
        elif self.dtype == torch.float32:
            return values
        return values.clamp(-limit, limit).to(self.dtype)
