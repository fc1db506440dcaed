"""On a GPU the host reads once in a step, at its end, whatever the number of buckets and rounds.

Triton's interpreter shows it without a GPU: tensors of the CPU count as tensors of a device.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import BUCKETS, engine_of, step
from kernels.interpreter import DEVICE
from kernels.interpreter import interpreter as interpreter

from dgc import compression, kernels
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.requests import Read
from dgc.comm.staging import HostCopy
from dgc.core.dense import ClippedCompressor
from dgc.memory import ClipByNorm, DGCSGDMemory, ResidualMemory
from dgc.sparse import payloads as formats


@pytest.fixture(autouse=True)
def triton_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_asked", "triton")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the host reads from the device: "step" at the end of a step, "method" where a method waits."""
    found: list[str] = []
    monkeypatch.setattr("dgc.comm.requests.HOST", "none")

    def read(numbers: torch.Tensor) -> Read:
        found.append("method")
        return Read(numbers)

    def copy(numbers: torch.Tensor) -> HostCopy:
        found.append("step")
        return HostCopy(numbers)

    monkeypatch.setattr("dgc.comm.requests.Read", read)
    monkeypatch.setattr("dgc.engine.loop.HostCopy", copy)
    yield found


def dgc_with(values: Any, indices: Any) -> Any:
    return compression.DGCCompressor(0.05, DGCSGDMemory(0.9), values=values, indices=indices)


METHODS: dict[str, Any] = {
    "dense": compression.DenseCompressor,
    "fp16": compression.FP16Compressor,
    "bf16": compression.BF16Compressor,
    "DGC": lambda: dgc_with("fp16", "int32"),
    "DGC, signs and Rice code": lambda: dgc_with(formats.SignValues(), formats.RiceIndices()),
    "DGC, 8 bits, packed": lambda: dgc_with(formats.Int8Values(), formats.PackedIndices()),
    "DGC at ratio 1": lambda: compression.DGCCompressor(1.0, DGCSGDMemory(0.9)),
    "DGC, reduce-scatter": lambda: compression.DGCCompressor(0.05, DGCSGDMemory(0.9), exchange="reduce_scatter"),
    "chunks": lambda: compression.ChunkCompressor(0.2, DGCSGDMemory(0.9), 32),
    "top-k": lambda: compression.SparseCompressor(0.05, ResidualMemory()),
    "signs": compression.ScaledSignCompressor,
    "QSGD": compression.QSGDCompressor,
    "signSGD": compression.SignSGDCompressor,
    "2 bits": compression.ThresholdCompressor,
    "2 bits, scattered": lambda: compression.ThresholdCompressor(wire="scatter"),
    "two phases, 8 bits": compression.TwoPhaseCompressor,
    "two phases, 4 bits": lambda: compression.TwoPhaseCompressor(4, hadamard=True),
    "PowerSGD": lambda: compression.PowerSGDCompressor(2, min_compression_rate=0),
    "PowerSGD, paper": lambda: compression.PowerSGDCompressor(2, mode="paper", min_compression_rate=0),
    "EF21": lambda: compression.EF21Compressor(compression.ScaledSignCompressor()),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_host_reads_once_per_step(name: str, reads: list[str]) -> None:
    engine = engine_of(LockstepWorld(1).transports[0], METHODS[name](), device=DEVICE)
    for seed in range(2):
        reads.clear()
        assert step(engine, seed) is None
        assert reads == ["step"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["DGC", "DGC, signs and Rice code", "signs", "PowerSGD", "two phases, 8 bits"])
def test_the_host_reads_once_per_step_of_gradients_in_16_bits(
    name: str, dtype: torch.dtype, reads: list[str]
) -> None:
    engine = engine_of(LockstepWorld(1).transports[0], METHODS[name](), dtype, DEVICE)
    assert step(engine, 0) is None
    assert reads == ["step"]


def test_a_method_that_needs_a_number_to_continue_reads_it_in_each_bucket(reads: list[str]) -> None:
    clips = ClippedCompressor(compression.DenseCompressor(), ClipByNorm(1e3))
    engine = engine_of(LockstepWorld(1).transports[0], clips, device=DEVICE)
    assert step(engine, 0) is None
    assert reads == ["method"] * BUCKETS


@pytest.mark.parametrize("name", METHODS)
def test_a_rank_with_nan_is_named_at_the_end_of_the_step(name: str, reads: list[str]) -> None:
    engine = engine_of(LockstepWorld(1).transports[0], METHODS[name](), device=DEVICE)
    assert "gradient of 1.b on rank 0 has NaN" in str(step(engine, 0, bad=1))
    assert step(engine, 1) is None
