"""An operation that can fail in backward."""

from typing import Any

import torch
from torch import Tensor


class Failing(torch.autograd.Function):
    """Fails in backward while `fails` is set."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Failing.fails:
            raise MemoryError("of the model")
        return gradient
