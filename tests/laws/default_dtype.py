"""A default dtype of torch's other than fp32: nothing in dgc may depend on it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# less precise than fp32, and more
OTHERS = (torch.float16, torch.float64)


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Declared(TorchDispatchMode):
    """No operation takes its dtype from the default: floats come from floats, or the operation names a dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, given = func(*args, **(kwargs or {})), tree_leaves((args, kwargs))
        if isinstance(made, Tensor) and made.is_floating_point():
            tensors = [x for x in given if isinstance(x, Tensor)]
            declared = any(isinstance(x, torch.dtype) for x in given)
            assert declared or any(x.is_floating_point() for x in tensors), f"{func}: {[x.dtype for x in tensors]}"
        return made


def check(history: Callable[[], list[Tensor]]) -> None:
    """`history` gives the same tensors, bit for bit, under every default dtype, and never depends on it."""
    with Declared():
        expected = history()
    for dtype in OTHERS:
        with default(dtype):
            found = history()
        assert len(found) == len(expected)
        for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert ours.dtype == theirs.dtype, (dtype, i)
            assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (ours, theirs))), (dtype, i)
