"""Notes the operations that make the host wait for a GPU. They can be seen without one."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dgc

PACKAGE = Path(dgc.__file__).parent
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"}
# Operations of torch that add floats in any order on a GPU, so that results would not repeat bit for bit.
ATOMIC = {"index_add", "index_add_", "scatter_add", "scatter_add_", "put_", "cumsum", "cumsum_", "bincount"}


class Watching(TorchDispatchMode):
    """Notes the function of dgc that causes each wait. To copy a list of numbers of the host is one, since its
    memory is not pinned. Refuses sums whose order changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def note(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file, function = Path(frame.f_code.co_filename), frame.f_code.co_name
            if PACKAGE in file.parents and not function.startswith("<"):
                self.seen.append(f"{file.relative_to(PACKAGE)} {function}")
                return
            frame = frame.f_back
        self.seen.append("elsewhere")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ATOMIC or not args[0].is_floating_point(), f"{name} adds floats in any order on a GPU"
        where = args[1] if name in ("index", "index_put", "index_put_") else ()
        masked = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in where)
        # a single number is an argument of a kernel
        if name in WAITS or masked or (name == "lift_fresh" and args[0].dim() > 0):
            self.note()
        return func(*args, **(kwargs or {}))


@contextmanager
def watching() -> Iterator[Watching]:
    watch, tolist = Watching(), torch.Tensor.tolist

    def noted(tensor: Any) -> Any:
        """tolist reads a CPU tensor without the dispatcher."""
        watch.note()
        return tolist(tensor)

    with watch, patch.object(torch.Tensor, "tolist", noted):
        yield watch
