"""A model whose backward can fail, with gradients of which some have been sent and others not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from failing_backward import Failing
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, layers: int, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))
        self.at: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(Failing.apply(x) if i == self.at else x).tanh()
        return (Failing.apply(x) if self.at == len(self.layers) else x).square().mean()

    def fail(self, at: int, train: Callable[[], Any]) -> None:
        """An exception in backward before it reaches layer `at - 1`, that the program catches."""
        self.at, Failing.fails = at, True
        try:
            with pytest.raises(MemoryError):
                train()
        finally:
            self.at, Failing.fails = None, False
