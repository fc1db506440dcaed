"""Where a step on a GPU makes the host wait: nowhere but in the functions listed here. Kernels move the bytes that
they state (`dgc.kernels.launch.moves`). Triton's interpreter shows both without a GPU.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from kernels.interpreter import DEVICE
from kernels.interpreter import interpreter as interpreter
from kernels.waits import watching
from triton.runtime.interpreter import InterpreterBuilder

from benchmarks._gpu_steps import COUNTED, DGC_BYTES, FORMATS, bytes_of_dgc, launches_of
from benchmarks.step_overhead import Ours, plan_buckets, resnet50
from dgc import compression, contrib, kernels
from dgc.comm.requests import AllGather, AllToAll, next_requests
from dgc.core.bucket import Bucket, lay_out
from dgc.engine.state import BucketStates
from dgc.kernels.launch import SECTOR, Launcher, bytes_moved, most_read
from dgc.memory import ClipByNorm, DGCSGDMemory, ResidualMemory
from dgc.sparse import payloads as formats
from dgc.sparse.selectors import Predicted, TopKPerChunk

# Numbers that are in host memory already are read at once. On a GPU nothing waits before the end of the step.
READ = {"comm/requests.py on_host"} if DEVICE == "cpu" else set()


@pytest.fixture(autouse=True)
def triton_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_asked", "triton")


def replied(conversation: Any) -> Any:
    """Its result where this process is the only rank."""
    try:
        requests: Any = next_requests(conversation)
        while True:
            copies = [(r.tensor.clone(), isinstance(r, AllGather | AllToAll)) for r in requests]
            requests = next_requests(conversation, tuple((copy,) if by_rank else copy for copy, by_rank in copies))
    except StopIteration as stop:
        return stop.value


def waits_of(compressor: Any, warm_up: int = 1) -> Any:
    """Of one step over a bucket, once the steps before it have made what is kept."""
    shapes = {"a": (12, 20), "b": (10, 12), "c": (7,), "d": (10, 12)}
    generator = torch.Generator().manual_seed(0)
    tensors = [(name, torch.randn(shape, generator=generator).to(DEVICE)) for name, shape in shapes.items()]
    bucket = Bucket("bucket", lay_out(tensors), torch.float32, torch.device(DEVICE))
    states = BucketStates(compressor)
    states.add(bucket, 1, 0)
    for step in range(warm_up + 1):
        for segment, (_, tensor) in zip(bucket.segments, tensors, strict=True):
            segment.of(bucket.flat).copy_(tensor)
        if step < warm_up:
            replied(states.reduce(bucket))
            continue
        with watching() as watch:
            assert replied(states.reduce(bucket)).nonfinite is None
    return watch.seen


def dgc_with(values: Any, indices: Any) -> Any:
    memory = DGCSGDMemory(0.9, gradient_clipping=ClipByNorm(1.0))
    return compression.DGCCompressor(0.05, memory, values=values, indices=indices)


FORMATS_OF_DGC = [
    (formats.CastValues("fp32"), formats.PlainIndices("int32")),
    (formats.CastValues("fp16"), formats.PlainIndices("int32")),
    (formats.SignValues(), formats.PackedIndices()),
    (formats.Int8Values(), formats.RiceIndices()),
    (formats.TwoBitValues(), formats.PlainIndices()),
    (formats.CastValues("bf16"), formats.ChunkIndices()),
]
PER_CHUNK = (TopKPerChunk(32), formats.TwoBitValues())
METHODS = [
    *(partial(dgc_with, *form) for form in FORMATS_OF_DGC),
    compression.ScaledSignCompressor,
    compression.QSGDCompressor,
    contrib.TernGradCompressor,
    contrib.NaturalCompressor,
    contrib.OneBitCompressor,
    compression.SignSGDCompressor,
    compression.ThresholdCompressor,
    lambda: compression.ThresholdCompressor(wire="scatter"),
    lambda: compression.TwoPhaseCompressor(4, hadamard=True),
    lambda: compression.DGCCompressor(1.0, DGCSGDMemory(0.9)),
    lambda: contrib.RandomKCompressor(0.1),
    lambda: compression.SparseCompressor(0.05, ResidualMemory(decay=0.95), *PER_CHUNK, vectors="sparse"),
]


@pytest.mark.parametrize("make", METHODS)
def test_no_method_waits_but_for_what_ranks_report(make: Any) -> None:
    """DGC never waits, clipping included."""
    assert set(waits_of(make())) == READ


@pytest.mark.parametrize("bits", [3, 6])
def test_fields_of_any_width_are_packed_and_unpacked_without_waiting(bits: int) -> None:
    levels = torch.arange(100, device=DEVICE).remainder(2**bits).byte()
    quantize = kernels.of(levels).quantize
    with watching() as watch:
        again = quantize.unpack(quantize.pack(levels, bits), bits, 100)
    assert watch.seen == [] and torch.equal(again, levels)


def test_a_dense_exchange_never_waits() -> None:
    assert waits_of(compression.DenseCompressor()) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: compression.ChunkCompressor(0.1, DGCSGDMemory(0.9), 32),
        lambda: compression.DGCCompressor(0.05, DGCSGDMemory(0.9), exchange="reduce_scatter"),
    ],
)
def test_a_sum_of_unknown_size_does_not_wait_on_a_device(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the same numbers are read at once."""
    monkeypatch.setattr("dgc.comm.requests.HOST", "none")
    assert waits_of(make()) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"rank": 1, "num_iters_per_step": 3},
        {"rank": 2, "warm_start": False, "orthogonalization": "qr"},
        {"rank": 2, "mode": "paper", "wire": "fp16"},
        {"rank": 1, "mode": "square", "warm_start": False, "orthogonalization": "authors"},
    ],
)
def test_powersgd_reads_once_at_the_end_of_a_step(settings: dict[str, Any]) -> None:
    """What all ranks report, and the largest magnitude."""
    # even and odd half steps have tables of their own
    seen = waits_of(compression.PowerSGDCompressor(min_compression_rate=0, **settings), warm_up=3)
    assert seen == list(READ)


def counts(make: Any, shapes: Any, ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Kernels and PyTorch's operations, until the payload and from then on."""
    monkeypatch.setattr("benchmarks._gpu_steps.COUNTED_SHAPES", shapes)
    return [(own.kernels, own.operations) for own in launches_of(make, ranks, torch.device(DEVICE))]


@pytest.mark.parametrize(
    ("name", "ranks", "encoding", "decoding"),
    [
        *(("DGC, fp16 and int32", ranks, (8, 0), (2, 0)) for ranks in (2, 5)),
        ("top-k, bf16 and int32", 3, (8, 0), (2, 0)),
        ("DGC, 2 bits and packed", 3, (13, 0), (3, 0)),
        ("DGC, sign and Rice", 3, (12, 0), (3, 0)),
        # two until the payload, and one for the mean with all checks
        *((name, 3, (2, 0), (1, 0)) for name in ("scaled signs", "2 bits", "QSGD", "int8 blocks")),
        # the second phase is part of what follows the first payloads
        ("two phases, int8", 2, (3, 1), (6, 3)),
        ("two phases, int4", 5, (3, 1), (6, 3)),
    ],
)
def test_launches_do_not_depend_on_the_number_of_ranks(
    name: str, ranks: int, encoding: Any, decoding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert counts(COUNTED[name], [(12, 20)] * 2, ranks, monkeypatch) == [encoding, decoding]


@pytest.mark.parametrize(
    ("name", "ranks", "encoding", "decoding"),
    [
        # `merge` searches for 16 ranks at a time
        ("DGC, fp16 and int32", 40, (8, 0), (4, 0)),
        # a program reads more than a kilobyte of each rank
        ("QSGD", 60, (2, 0), (2, 0)),
    ],
)
def test_more_ranks_than_a_launch_adds_take_more_launches(
    name: str, ranks: int, encoding: Any, decoding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert counts(COUNTED[name], [(12, 20)] * 2, ranks, monkeypatch) == [encoding, decoding]


POWERSGD: Any = {1: [(20, 30)] * 2, 3: [(20, 30), (7,), (6, 4), (9, 70)]}  # by the number of matrices' shapes


@pytest.mark.parametrize(
    ("settings", "groups", "expected"),
    [
        *(({"rank": rank}, groups, 8) for rank in (1, 2, 4) for groups in POWERSGD),
        ({"rank": 2, "wire": "fp16"}, 1, 9),
        ({"rank": 2, "mode": "square"}, 3, 14),
        *(({"rank": 4, "mode": "paper"}, groups, 10) for groups in POWERSGD),
        # the factors of each shape are joined, on two sides of two products
        *(({"rank": 1, "num_iters_per_step": 2}, groups, 13 + 4 * groups) for groups in POWERSGD),
    ],
)
def test_launches_of_all_half_steps_of_powersgd(
    settings: Any, groups: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = partial(compression.PowerSGDCompressor, min_compression_rate=0, **settings)
    assert sum(map(sum, counts(make, POWERSGD[groups], 2, monkeypatch))) == expected


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a GPU")


@contextmanager
def measured() -> Iterator[list[Any]]:
    """Collect (kernel, programs, bytes moved, bytes stated, (most that a program reads in blocks, stated)): of a
    scalar its own, of a block whole sectors.
    """
    found, moved, by_program = [], {"read": 0, "written": 0}, Counter[Any]()

    def count(directions: str, builder: Any, pointers: Any, mask: Any) -> None:
        if directions == "read" and pointers.data.size > 1:
            by_program[builder.grid_idx] += (
                pointers.get_element_ty().primitive_bitwidth // 8 * int(mask.data.sum())
            )
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        one = pointers.get_element_ty().primitive_bitwidth // 8 * addresses.size
        nbytes = one if pointers.data.size == 1 else SECTOR * np.unique(addresses // SECTOR).size
        for direction in directions.split():
            moved[direction] += nbytes

    def watched(name: str, directions: str, pointers_at: int, mask_at: int) -> Any:
        original = getattr(InterpreterBuilder, name)

        def access(builder: Any, *arguments: Any) -> Any:
            count(directions, builder, arguments[pointers_at], arguments[mask_at])
            return original(builder, *arguments)

        return patch.object(InterpreterBuilder, name, access)

    launch = Launcher.__call__

    def launched(launcher: Any, kernel: Any, near: Any, programs: int, *arguments: Any) -> None:
        moved.update(read=0, written=0)
        by_program.clear()
        launch(launcher, kernel, near, programs, *arguments)
        stated = bytes_moved(kernel, programs, arguments)
        most = max(by_program.values(), default=0), most_read(kernel, programs, arguments)
        found.append((kernel.fn.__name__, programs, (moved["read"], moved["written"]), stated, most))

    with (
        watched("create_masked_load", "read", 0, 1),
        watched("create_masked_store", "written", 0, 2),
        watched("create_atomic_rmw", "read written", 1, 3),
        patch.object(Launcher, "__call__", launched),
    ):
        yield found


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.proof)])
def test_no_kernel_moves_more_than_it_states(dtype: Any) -> None:
    """But for a few numbers per program, and the rest of a sector where a tile begins or ends within it. Nor does
    a program read more than it states.
    """
    from kernels import compile_triton  # after `kernels.interpreter`

    with measured() as found:
        compile_triton.everything([dtype], (50,))
    for name, programs, moved, stated, (read, most) in found:
        for own, said in zip(moved, stated, strict=True):
            assert own <= said + 5 * SECTOR * (programs + 2), (name, programs, moved, stated)
        assert read <= most, (name, read, most)


OF_DGC = FORMATS["fp16 values, int32 indices"]


@interpreted
def test_dgc_moves_at_most_the_bytes_that_it_states() -> None:
    """In a step with candidates at most a fifth less."""
    layout = [lay_out([("a", torch.empty(150, 300)), ("b", torch.empty(100, 70))])]
    ours = Ours("triton", Predicted(), layout, 0.01, 0.0, OF_DGC, "cpu")
    for step in range(3):
        history = ours.quotas[0].history
        history.update({"t2": history["t1"]} if history else {})  # thresholds still grow, so that the bounds hold
        with measured() as found:
            ours.step([torch.randn(52000, generator=torch.Generator().manual_seed(step))])
    names, moved, stated = zip(
        *((name, sum(moved), sum(stated)) for name, _, moved, stated, _ in found), strict=True
    )
    assert names == ("take", "accumulate", *["choose"] * 3, "tally", "write", "write_plain")
    assert sum(moved) <= sum(stated) <= 1.2 * sum(moved), found
    by_kernel = Counter[str]()
    for name, nbytes in zip(names, stated, strict=True):
        by_kernel[name] += nbytes
    assert bytes_of_dgc(layout, OF_DGC, 0.01) == by_kernel, "without memory"


def test_dgc_moves_little_more_than_the_pass_over_its_buffers() -> None:
    """The limit is 1.3 times the pass over g, u and v."""
    layout = plan_buckets(resnet50())
    numel = sum(segment.numel for segments in layout for segment in segments)
    assert DGC_BYTES < sum(bytes_of_dgc(layout, OF_DGC).values()) / numel < 1.3 * DGC_BYTES
