"""Kernels move the bytes that they state (`dgc.kernels.triton_tables.moves`). Triton's interpreter counts them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from kernels.interpreter import interpreter as interpreter
from triton.runtime.interpreter import InterpreterBuilder

from benchmarks.gpu_steps import DGC_BYTES, FORMATS, bytes_of_dgc
from benchmarks.step_methods import Ours
from benchmarks.step_overhead import plan_buckets, resnet50
from dgc import kernels
from dgc.bucket import lay_out
from dgc.kernels.triton_tables import SECTOR, Launcher, bytes_moved
from dgc.selection import Predicted


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_asked", "triton")


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a GPU")


@contextmanager
def measured() -> Iterator[list[tuple[str, int, tuple[int, int], tuple[int, int]]]]:
    """Collect (kernel, programs, bytes moved, bytes stated) of each launch; bytes read, and bytes written.

    A scalar access moves its own bytes, that of a block of elements all sectors that these touch.
    """
    found: list[tuple[str, int, tuple[int, int], tuple[int, int]]] = []
    moved = {"read": 0, "written": 0}

    def count(directions: str, pointers: Any, mask: Any) -> None:
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        one = pointers.get_element_ty().primitive_bitwidth // 8 * addresses.size
        nbytes = one if pointers.data.size == 1 else SECTOR * np.unique(addresses // SECTOR).size
        for direction in directions.split():
            moved[direction] += nbytes

    def watched(name: str, directions: str, pointers_at: int, mask_at: int) -> Any:
        original = getattr(InterpreterBuilder, name)

        def access(builder: Any, *arguments: Any) -> Any:
            count(directions, arguments[pointers_at], arguments[mask_at])
            return original(builder, *arguments)

        return patch.object(InterpreterBuilder, name, access)

    launch = Launcher.__call__

    def launched(launcher: Any, kernel: Any, near: Any, programs: int, *arguments: Any) -> None:
        moved.update(read=0, written=0)
        launch(launcher, kernel, near, programs, *arguments)
        stated = bytes_moved(kernel, programs, arguments)
        found.append((kernel.fn.__name__, programs, (moved["read"], moved["written"]), stated))

    with (
        watched("create_masked_load", "read", 0, 1),
        watched("create_masked_store", "written", 0, 2),
        watched("create_atomic_rmw", "read written", 1, 3),
        patch.object(Launcher, "__call__", launched),
    ):
        yield found


def test_no_kernel_moves_more_than_it_states() -> None:
    """But for a few numbers per program, and the rest of a sector where a tile begins or ends within it."""
    from kernels import compile_triton  # after `kernels.interpreter`

    with measured() as found:
        compile_triton.everything([torch.float16, torch.float32], (50,))
    for name, programs, moved, stated in found:
        for own, said in zip(moved, stated, strict=True):
            assert own <= said + 5 * SECTOR * (programs + 2), (name, programs, moved, stated)


def test_dgc() -> None:
    """In a step with candidates, the bytes stated are at most a fifth more than those moved."""
    form = FORMATS["fp16 values, int32 indices"]
    layout = [lay_out([("a", torch.empty(150, 300)), ("b", torch.empty(100, 70))])]
    ours = Ours("triton", Predicted(), layout, 0.01, 0.0, form, "cpu")
    for step in range(3):
        history = ours.plans[0].history
        history.update({"t2": history["t1"]} if history else {})  # thresholds still grow, so that the bounds hold
        with measured() as found:
            ours.step([torch.randn(52000, generator=torch.Generator().manual_seed(step))])
    names, moved, stated = zip(*((name, sum(moved), sum(stated)) for name, _, moved, stated in found), strict=True)
    assert names == ("take", "accumulate", "choose", "tally", "offsets", "write", "write_plain")
    assert sum(moved) <= sum(stated) <= 1.2 * sum(moved), found
    without_memory = bytes_of_dgc(layout, form, 0.01)
    assert without_memory == dict(zip(names, stated, strict=True))


def test_target() -> None:
    """DGC moves at most 1.3 times the bytes of the pass over g, u and v."""
    layout = plan_buckets(resnet50())
    numel = sum(segment.numel for segments in layout for segment in segments)
    moved = bytes_of_dgc(layout, FORMATS["fp16 values, int32 indices"])
    assert DGC_BYTES < sum(moved.values()) / numel < 1.3 * DGC_BYTES
