"""The boundary to native code: a wrong tensor is an error that says so, never a crash."""

from pathlib import Path

import pytest
import torch

from dgc.kernels.codec.native import NativeCodec
from dgc.kernels.library import pointer, pointers
from dgc.kernels.lowrank.native import NativeLowRank
from dgc.kernels.quantize.native import NativeQuantizers
from dgc.kernels.selection.native import Native
from dgc.kernels.selection.protocol import Budget, PassInputs, SparseVector

KERNELS = Path(__file__).parents[2] / "dgc" / "kernels"
pytestmark = pytest.mark.usefixtures("no_type_checks")


def test_a_pointer_is_of_a_contiguous_cpu_tensor_of_the_dtype() -> None:
    x = torch.arange(12.0).view(3, 4)
    assert pointer(x, torch.float32) == x.data_ptr()
    assert pointer(x[1], torch.float32) == x.data_ptr() + 16
    assert pointer(None, torch.float32) is None
    assert pointers([x, x[2]], torch.float32) == b"".join(t.data_ptr().to_bytes(8, "little") for t in (x, x[2]))
    for wrong, message in (
        (x.double(), r"torch.float32 tensor on cpu, not a contiguous torch.float64 tensor of shape \(3, 4\)"),
        (x.T, r"not a non-contiguous \(stride \(1, 4\)\) torch.float32 tensor of shape \(4, 3\) on cpu"),
        (x.to("meta"), "on cpu, not a contiguous torch.float32 tensor .* on meta"),
    ):
        for check in (pointer, lambda t, dtype: pointers([x, t], dtype)):
            with pytest.raises(TypeError, match=message):
                check(wrong, torch.float32)


def test_only_checked_pointers_reach_the_kernels() -> None:
    found = {path.name: path.read_text().count("data_ptr") for path in KERNELS.glob("*.py")}
    assert {name: count for name, count in found.items() if count} == {"library.py": 1, "triton_tables.py": 1}


def test_kernels_refuse_other_tensors() -> None:
    native, codec, quantizers = Native(), NativeCodec(), NativeQuantizers()
    n = 64
    x, other = torch.ones(n), torch.ones(n, dtype=torch.float64)
    strided, bounds = torch.ones(2 * n)[::2], torch.tensor([0, n])
    budget = Budget(bounds, torch.tensor([3]), 3)
    sent = native.select(x, budget).elements
    short = Budget(bounds.int(), torch.tensor([3]), 3)
    doubled = SparseVector(sent.indices, sent.values.double(), sent.count)
    section = torch.zeros(64, dtype=torch.uint8)
    M, U, W = torch.ones(2, 4, 8), torch.ones(2, 1, 4), torch.ones(2, 1, 8)
    calls = {
        "v": lambda: native.accumulate_(PassInputs((x,), None, other)),
        "u": lambda: native.accumulate_(PassInputs((x,), other, x)),
        "strided v": lambda: native.accumulate_(PassInputs((x,), None, strided)),
        "strided g": lambda: native.accumulate_(PassInputs((strided,), None, x)),
        "sent": lambda: native.accumulate_(PassInputs((x,), None, x, sent=doubled)),
        "bounds": lambda: native.select(x, short),
        "lower_bounds": lambda: native.select(x, budget, other[:1]),
        "moments": lambda: native.moments(other, bounds),
        "tail": lambda: native.tail(x, bounds, other[:1]),
        "take": lambda: native.remove_sent_(doubled, None, x),
        "merge": lambda: native.merge_mean([sent, doubled], 2, n),
        "decay": lambda: native.decay_(x, other, 0.1, 0.1, 0.9, False),
        "values": lambda: codec.cast_encode_(other, torch.float16, section),
        "section": lambda: codec.plain_encode_(sent.indices, torch.int32, section.view(torch.int32)),
        "levels": lambda: quantizers.uniform_encode(x, bounds, other[:1], 1, 2, None),
        "total": lambda: quantizers.natural_add_(section, strided),
        "matrices": lambda: NativeLowRank(native).subtract_(M.mT.contiguous().mT, U, W),
        "factors": lambda: NativeLowRank(native).subtract_(M, U.double(), W),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match="a kernel takes a contiguous torch"):
            call()
            pytest.fail(name)
