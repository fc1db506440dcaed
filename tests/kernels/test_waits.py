"""Where a step on a GPU makes the host wait for the device: nowhere but in the functions that are listed here.

In Triton's interpreter, where the operations that would wait or copy from the host can be seen without a GPU.
"""

import sys
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
with pytest.MonkeyPatch.context() as environment:
    if DEVICE == "cpu":
        environment.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="Triton is not installed")
    import dgc.kernels as kernels
    from dgc.bucket import Bucket, lay_out
    from dgc.comm.requests import AllGather, AllToAll, next_requests
    from dgc.compression import (
        ChunkCompressor,
        DenseCompressor,
        DGCCompressor,
        NaturalCompressor,
        OneBitCompressor,
        PowerSGDCompressor,
        QSGDCompressor,
        RandomKCompressor,
        ScaledSignCompressor,
        SignSGDCompressor,
        SparseCompressor,
        TernGradCompressor,
        ThresholdCompressor,
    )
    from dgc.engine.state import BucketStates
    from dgc.memory import ClipByNorm, DGCSGDMemory, ResidualMemory
    from dgc.selection import TopKPerChunk
    from dgc.wire import (
        CastValues,
        ChunkIndices,
        Int8Values,
        PackedIndices,
        PlainIndices,
        RiceIndices,
        SignValues,
        TwoBitValues,
    )

PACKAGE = Path(kernels.__file__).parents[1]
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"}
# Operations of torch that add floats in any order on a GPU, so that results would not repeat bit for bit.
ATOMIC = {"index_add", "index_add_", "scatter_add", "scatter_add_", "put_", "cumsum", "cumsum_", "bincount"}

# Numbers that are in host memory already are read at once. On a GPU, `read` does not wait.
READ = {"comm/requests.py read"} if DEVICE == "cpu" else set()


@pytest.fixture(autouse=True)
def triton_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "_asked", "triton")


class Watching(TorchDispatchMode):
    """Notes the function of this package that causes each wait. To copy a list of numbers of the host is one,
    since its memory is not pinned. Refuses sums whose order changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def note(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (
            PACKAGE not in Path(frame.f_code.co_filename).parents or frame.f_code.co_name.startswith("<")
        ):
            frame = frame.f_back
        if frame is not None:
            where = Path(frame.f_code.co_filename).relative_to(PACKAGE)
            self.seen.append(f"{where} {frame.f_code.co_name}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ATOMIC or not args[0].is_floating_point(), f"{name} adds floats in any order on a GPU"
        where = args[1] if name in ("index", "index_put", "index_put_") else ()
        masked = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in where)
        # a single number is an argument of a kernel
        upload = name == "lift_fresh" and args[0].dim() > 0
        if name in WAITS or upload or masked:
            self.note()
        return func(*args, **(kwargs or {}))


@contextmanager
def watching() -> Any:
    watch, tolist = Watching(), torch.Tensor.tolist

    def noted(tensor: Any) -> Any:
        watch.note()
        return tolist(tensor)

    with watch, patch.object(torch.Tensor, "tolist", noted):
        yield watch


def answered(conversation: Any) -> Any:
    """Its result where this process is the only rank."""
    try:
        requests: Any = next_requests(conversation)
        while True:
            copies = [(r.tensor.clone(), isinstance(r, AllGather | AllToAll)) for r in requests]
            requests = next_requests(conversation, tuple((copy,) if by_rank else copy for copy, by_rank in copies))
    except StopIteration as stop:
        return stop.value


def waits_of(compressor: Any) -> Any:
    """Of one step over a bucket, once the step before it has made what is kept."""
    shapes = {"a": (12, 20), "b": (10, 12), "c": (7,), "d": (10, 12)}
    generator = torch.Generator().manual_seed(0)
    tensors = [(name, torch.randn(shape, generator=generator).to(DEVICE)) for name, shape in shapes.items()]
    bucket = Bucket("bucket", lay_out(tensors), torch.float32, torch.device(DEVICE))
    states = BucketStates(compressor)
    states.add(bucket, 1, 0)
    for step in range(2):
        for segment, (_, tensor) in zip(bucket.segments, tensors, strict=True):
            segment.of(bucket.flat).copy_(tensor)
        if step < 1:
            answered(states.reduce(bucket))
            continue
        with watching() as watch:
            assert answered(states.reduce(bucket)).nonfinite is None
    return watch.seen


FORMATS = [
    (CastValues("fp16"), PlainIndices("int32")),
    (SignValues(), PackedIndices()),
    (Int8Values(), RiceIndices()),
    (TwoBitValues(), PlainIndices()),
    (CastValues("bf16"), ChunkIndices()),
]


@pytest.mark.parametrize("values, indices", FORMATS)
def test_dgc_never_waits(values: Any, indices: Any) -> None:
    """Clipping included."""
    memory = DGCSGDMemory(0.9, gradient_clipping=ClipByNorm(1.0))
    seen = waits_of(DGCCompressor(0.05, memory, values=values, indices=indices))
    assert set(seen) == READ


FACTORS = "compression/matrices.py orthonormalize"


@pytest.mark.parametrize("mode, rank", [("residual", 1), ("paper", 2)])
def test_powersgd(mode: Any, rank: Any) -> None:
    seen = waits_of(PowerSGDCompressor(rank, 0, mode=mode, orthogonalization="cholesky_qr"))
    assert set(seen) == {"compression/powersgd.py _half_step", FACTORS, *READ}


def test_factors_of_all_shapes_are_checked_in_one_read() -> None:
    """P of two shapes."""
    seen = waits_of(PowerSGDCompressor(2, 0, mode="paper", orthogonalization="cholesky_qr"))
    assert seen.count(FACTORS) == 1


OTHERS = [
    (DenseCompressor(), set()),
    (DGCCompressor(1.0, DGCSGDMemory(0.9)), READ),
    *(
        (method(), READ)
        for method in (
            ScaledSignCompressor,
            QSGDCompressor,
            TernGradCompressor,
            NaturalCompressor,
            OneBitCompressor,
            SignSGDCompressor,
            ThresholdCompressor,
        )
    ),
    (ThresholdCompressor(wire="scatter"), READ),
    (
        ChunkCompressor(0.1, DGCSGDMemory(0.9), 32),
        {"compression/chunks.py reduce", *READ},
    ),
    (
        SparseCompressor(0.05, ResidualMemory(decay=0.95), TopKPerChunk(32), TwoBitValues(), vectors="sparse"),
        READ,
    ),
    (RandomKCompressor(0.1), READ),
]


def test_other_methods() -> None:
    for method, expected in OTHERS:
        assert set(waits_of(method)) == expected, type(method).__name__
