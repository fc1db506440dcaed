"""The boundary to native code: a wrong tensor is an error that says so, never a crash."""

import struct
from ctypes import ArgumentError, string_at
from pathlib import Path

import pytest
import torch

from dgc.kernels.codec import IndexCode, IndexKind
from dgc.kernels.library import Address, Addresses
from dgc.kernels.native import NativeCodec, NativeLowRank, NativeQuantizers, NativeSelection
from dgc.kernels.selection import Budget, PassInputs, SparseVector

KERNELS = Path(__file__).parents[2] / "dgc" / "kernels"
pytestmark = pytest.mark.usefixtures("no_type_checks")


def test_an_address_is_of_a_contiguous_cpu_tensor_of_the_dtype() -> None:
    x = torch.arange(12.0).view(3, 4)
    one, several = Address(torch.float32), Addresses(torch.float32)
    assert string_at(one.from_param(x), 8) == struct.pack("ff", 0, 1)
    assert string_at(one.from_param(x[1]), 8) == struct.pack("ff", 4, 5)
    assert one.from_param(None) is None and several.from_param(None) is None
    assert several.from_param([x, x[2]]) == b"".join(t.data_ptr().to_bytes(8, "little") for t in (x, x[2]))
    for wrong, message in (
        (x.double(), r"torch.float32 tensor on cpu, not a contiguous torch.float64 tensor of shape \(3, 4\)"),
        (x.T, r"not a non-contiguous \(stride \(1, 4\)\) torch.float32 tensor of shape \(4, 3\) on cpu"),
        (x.to("meta"), "on cpu, not a contiguous torch.float32 tensor .* on meta"),
    ):
        with pytest.raises(TypeError, match=message):
            one.from_param(wrong)
        with pytest.raises(TypeError, match=message):
            several.from_param([x, wrong])


def test_only_checked_pointers_reach_the_kernels() -> None:
    found = {path.name: path.read_text().count("data_ptr") for path in KERNELS.glob("*.py")}
    expected = {"library.py": 2, "triton_tables.py": 1, "triton_lowrank.py": 2}
    assert {name: count for name, count in found.items() if count} == expected


def test_kernels_refuse_other_tensors() -> None:
    native, codec, quantizers = NativeSelection(), NativeCodec(), NativeQuantizers()
    n = 64
    x, other = torch.ones(n), torch.ones(n, dtype=torch.float64)
    strided, bounds = torch.ones(2 * n)[::2], torch.tensor([0, n])
    budget = Budget(bounds, torch.tensor([3]), 3)
    sent = native.select(x, budget).elements
    short = Budget(bounds.int(), torch.tensor([3]), 3)
    doubled = SparseVector(sent.indices, sent.values.double(), sent.count)
    section = torch.zeros(64, dtype=torch.uint8)
    code = IndexCode(IndexKind.INT32, 3, n, 12)
    M, U, W = torch.ones(2, 4, 8), torch.ones(2, 1, 4), torch.ones(2, 1, 8)
    calls = {
        "v": lambda: native.accumulate_(PassInputs((x,), None, other)),
        "u": lambda: native.accumulate_(PassInputs((x,), other, x)),
        "strided v": lambda: native.accumulate_(PassInputs((x,), None, strided)),
        "strided g": lambda: native.accumulate_(PassInputs((strided,), None, x)),
        "sent": lambda: native.accumulate_(PassInputs((x,), None, x, sent=doubled)),
        "bounds": lambda: native.select(x, short),
        "lower_bounds": lambda: native.select(x, budget, other[:1]),
        "assign": lambda: native.assign_((strided,), x),
        "moments": lambda: native.moments(other, bounds),
        "largest": lambda: quantizers.largest(other, bounds),
        "positives": lambda: quantizers.positives(x, bounds.int()),
        "tail": lambda: native.tail(x, bounds, other[:1]),
        "take": lambda: native.remove_sent_(doubled, None, x),
        "merge": lambda: native.merge_mean([sent, doubled], 2, n),
        "decay": lambda: native.decay_(x, other, 0.1, 0.1, 0.9, False),
        "values": lambda: codec.cast_encode_(other, torch.float16, section),
        "section": lambda: codec.indices_encode_(sent, code, section.view(torch.int32)),
        "levels": lambda: quantizers.uniform_encode(x, bounds, other[:1], 1, 2, None),
        "total": lambda: quantizers.natural_mean_([section], 1, strided),
        "matrices": lambda: NativeLowRank(native).subtract_(M.mT.contiguous().mT, U, W),
        "factors": lambda: NativeLowRank(native).subtract_(M, U.double(), W),
    }
    for name, call in calls.items():
        with pytest.raises(ArgumentError, match="a kernel takes a contiguous torch"):
            call()
            pytest.fail(name)
