"""The workloads of `benchmarks.gpu`: codecs, whole steps of methods without a network, and a training step.

With the host operations of a step: kernels launched, and waits for the device; and with the laws: those of the
Triton kernels on a real device (tests/kernels/test_triton*.py), and bits of whole steps.
"""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import dgc.kernels as kernels
from benchmarks.harness import in_turns, middle
from benchmarks.stand_ins import cases, load_tests
from dgc.bucket import Bucket, Segment, lay_out
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.requests import AllGather, Conversation, next_requests
from dgc.compression import (
    BlockwiseCompressor,
    DGCCompressor,
    PowerSGDCompressor,
    QSGDCompressor,
    ScaledSignCompressor,
    SparseCompressor,
    TernGradCompressor,
    ThresholdCompressor,
)
from dgc.compression.protocol import Compressor, Result, SparseResult
from dgc.engine.state import BucketStates
from dgc.kernels import Merged, SparseVector
from dgc.kernels.triton_tables import Launcher
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from dgc.selection import plan_selection
from dgc.wire import CastValues, Int8Values, PackedIndices, PlainIndices, RiceIndices, SignValues, SparseFormat
from dgc.wire.payload import PayloadPlan

FORMATS = {
    "fp16 values, int32 indices": SparseFormat(CastValues("fp16"), PlainIndices("int32")),
    "int8 values, packed indices": SparseFormat(Int8Values(), PackedIndices()),
    "sign values, Rice indices": SparseFormat(SignValues(), RiceIndices()),
}
Shapes = Sequence[tuple[int, ...]]


def random_gradients(buckets: Sequence[Shapes], seed: int, device: torch.device) -> list[Tensor]:
    """Return one flat tensor per bucket, with equal values on every device."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [sum(torch.Size(shape).numel() for shape in shapes) for shapes in buckets]
    return [torch.randn(size, generator=generator).to(device) for size in sizes]


class Codec:
    """Payloads of `ranks` ranks for one bucket, with different random elements for each rank."""

    def __init__(self, form: SparseFormat, numel: int, density: float, device: torch.device, ranks: int):
        self.form, self.numel = form, numel
        self.codec = kernels.of(torch.empty(0, device=device)).codec
        self.plan = plan_selection(lay_out([("a", torch.empty(numel, device="meta"))]), density, device)
        self.none = torch.full((), numel, dtype=torch.int64, device=device)
        self.payload = PayloadPlan(self.form, self.plan.per_tensor, numel)
        self.selections = [self._selection(rank, device) for rank in range(ranks)]
        self.payloads = [self._encode(selection) for selection in self.selections]
        self.parts = self.decode()

    def _selection(self, rank: int, device: torch.device) -> SparseVector:
        generator, k = torch.Generator().manual_seed(rank), self.plan.capacity
        indices = torch.randperm(self.numel, generator=generator)[:k].sort().values.int()
        values, count = torch.randn(k, generator=generator), torch.tensor(k, dtype=torch.int32)
        return SparseVector(indices.to(device), values.to(device), count.to(device))

    def _encode(self, selection: SparseVector) -> Tensor:
        return self.payload.encode(self.codec, selection, self.none).payload

    def encode(self) -> Tensor:
        return self._encode(self.selections[0])

    def decode(self) -> list[SparseVector]:
        return self.payload.decode(self.codec, self.payloads).wait()[0]

    def merge(self) -> Merged:
        return kernels.of(self.parts[0].values).selection.merge_mean(self.parts, len(self.parts), self.numel)


def alone(conversation: Conversation[Result]) -> Result:
    """Return the result with one rank: every request is answered at once with its own tensors."""
    try:
        requests = next_requests(conversation)
        while True:
            replies = [(r.tensor,) if isinstance(r, AllGather) else r.tensor for r in requests]  # type: ignore[union-attr]
            requests = next_requests(conversation, tuple(replies))
    except StopIteration as stop:
        result: Result = stop.value
        return result


class Whole:
    """A step of a compressor over all buckets: gradient in, mean and residual out."""

    def __init__(self, name: str, compressor: Compressor, buckets: Sequence[Shapes], device: torch.device):
        self.name, self.states = name, BucketStates(compressor)
        self.buckets = [
            Bucket(f"bucket{b}", self._segments(shapes), torch.float32, device) for b, shapes in enumerate(buckets)
        ]
        for bucket in self.buckets:
            self.states.add(bucket, 1, 0)

    @staticmethod
    def _segments(shapes: Shapes) -> tuple[Segment, ...]:
        return lay_out([(str(i), torch.empty(shape, device="meta")) for i, shape in enumerate(shapes)])

    def step(self, gradients: Sequence[Tensor]) -> list[Result]:
        for bucket, flat in zip(self.buckets, gradients, strict=True):
            for i, part in enumerate(flat.split([segment.numel for segment in bucket.segments])):
                bucket.use_gradient(i, part)
        return [alone(self.states.reduce(bucket)) for bucket in self.buckets]


class Training:
    """Forward, backward and step of a small network. Gradients are exchanged during backward."""

    def __init__(self, width: int, device: torch.device):
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device)
        self.x = torch.randn(32, width, generator=torch.Generator().manual_seed(0)).to(device)
        inner = DGCSGD(self.net.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
        self.optimizer = DistributedOptimizer(
            inner,
            self.net.named_parameters(),
            DGCCompressor(0.001, DGCSGDMemory(0.9)),
            bucket_mb=8 * width * width / 2**20,
            transport=LockstepWorld(1).transports[0],
        )

    @property
    def buckets(self) -> int:
        return len(self.optimizer.planned)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(self.x).square().mean().backward()
        self.optimizer.step()


def milliseconds(step: Callable[[], object], device: torch.device, rounds: int, warm_up: int = 3) -> float:
    """Return the median. The device is idle before each measurement."""

    def once(number: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1e3 * (time.perf_counter() - start)

    return middle(in_turns({"": once}, rounds, warm_up)[""])


ROOT = Path(__file__).parents[1]
MESSAGE = "called a synchronizing CUDA operation"
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@dataclass(frozen=True)
class Counts:
    """Counts of a step.

    waits: waits that PyTorch reports, by place. launches: of PyTorch's and Triton's kernels; 0 if the profiler
    cannot see the GPU. driver_waits: all waits in the profile, from any caller.
    """

    waits: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    driver_waits: int = 0


def count(step: Callable[[], object], device: torch.device) -> Counts:
    """Count in two calls, the first under PyTorch's check for waits, the second under its profiler."""
    if device.type != "cuda":
        step()
        return Counts()
    waits = waits_of(step)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
    events = {event.key: event.count for event in profiler.key_averages()}
    return Counts(waits, sum(events.get(name, 0) for name in LAUNCHES), sum(events.get(name, 0) for name in WAITS))


def waits_of(step: Callable[[], object]) -> Counter[str]:
    """Return file and line of each operation that waits, and its count."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return Counter(f"{place(w.filename)}:{w.lineno}" for w in seen if MESSAGE in str(w.message))


def place(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(ROOT)) if ROOT in path.parents else path.name


# Operations of PyTorch that launch nothing: views, empty tensors, and reads
FREE = set(
    """
    view slice select as_strided unsqueeze squeeze detach alias expand split split_with_sizes unbind permute t
    transpose diagonal _unsafe_view _reshape_alias empty empty_like empty_strided new_empty lift_fresh
    _local_scalar_dense is_pinned
    """.split()
)


class Launches(TorchDispatchMode):
    """Counts kernels of this library, and operations of PyTorch that launch some of their own.

    Triton's interpreter uses PyTorch for itself. That is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.operations = 0

    def __enter__(self) -> "Launches":
        launch = Launcher.__call__

        def counted(launcher: Launcher, kernel: Any, near: Tensor, programs: int, *arguments: object) -> None:
            self.kernels += programs > 0
            with _disable_current_modes():
                launch(launcher, kernel, near, programs, *arguments)

        self._patch = patch.object(Launcher, "__call__", counted)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += func.overloadpacket.__name__ not in FREE
        return func(*args, **(kwargs or {}))


COUNTED: dict[str, Callable[[], Compressor]] = {
    "DGC, fp16 and int32": lambda: DGCCompressor(0.002, DGCSGDMemory(0.9), values="fp16", indices="int32"),
    "DGC, fp32 and int64": lambda: DGCCompressor(0.002, DGCSGDMemory(0.9)),
    "DGC, sign and Rice": lambda: DGCCompressor(0.002, DGCSGDMemory(0.9), values="sign", indices="rice"),
    "top-k, bf16 and int32": lambda: SparseCompressor(0.002, ResidualMemory(), values="bf16", indices="int32"),
    "scaled signs": ScaledSignCompressor,
    "2 bits": lambda: ThresholdCompressor(wire="gather"),
    "QSGD": QSGDCompressor,
    "TernGrad": TernGradCompressor,
    "int8 blocks": BlockwiseCompressor,
    "PowerSGD, rank 4": lambda: PowerSGDCompressor(4, 0),
}


COUNTED_SHAPES = [(40, 50)] * 3


def launches_of(make: Callable[[], Compressor], ranks: int, device: torch.device) -> tuple[Launches, Launches]:
    """Count the launches of one bucket's step: until its first request, and from then on."""
    whole, encoding, decoding = Whole("", make(), [COUNTED_SHAPES], device), Launches(), Launches()
    (bucket,), states = whole.buckets, whole.states
    states.add(bucket, ranks, 0)
    for step in range(3):  # the first steps make tables and histories
        (gradient,) = random_gradients([COUNTED_SHAPES], step, device)
        for i, s in enumerate(bucket.segments):
            bucket.use_gradient(i, gradient[s.offset : s.offset + s.numel])
        encoding, decoding = Launches(), Launches()
        conversation, replies, counting = states.reduce(bucket), None, encoding
        with suppress(StopIteration):
            while True:
                with counting:
                    requests = next_requests(conversation, replies)
                replies, counting = tuple(_answer(request, ranks) for request in requests), decoding
    return encoding, decoding


def _answer(request: Any, ranks: int) -> Any:
    """The reply of equal ranks, as adjacent parts of one tensor."""
    if isinstance(request, AllGather):
        return torch.stack([request.tensor] * ranks).unbind()
    return request.tensor.clone()


TESTS = ROOT / "tests" / "kernels"
LEFT_OUT = {
    "test_every_kernel_compiles_for_gpus": "compiles for other GPUs than this one",
    "test_importing_dgc_does_not_import_triton": "says nothing of the device",
}
SHAPES = [(64, 300), (40, 33), (500,), (64, 300)]
STEPS = 4
CPU = torch.device("cpu")


def laws(device: torch.device) -> Iterator[tuple[str, Callable[[], None]]]:
    yield from cases(load_tests(TESTS / "test_triton.py"), LEFT_OUT)
    for file in ("test_triton_codec.py", "test_triton_lowrank.py"):
        yield from cases(load_tests(TESTS / file), {})
    for name, form in FORMATS.items():
        yield f"payload of {name} has the CPU's bits", lambda form=form: payloads_are_alike(form, device)  # type: ignore[misc]
    methods: dict[str, Callable[[], Compressor]] = {
        "DGC": lambda: DGCCompressor(0.02, DGCSGDMemory(0.9)),
        "PowerSGD": lambda: PowerSGDCompressor(2, 0),
    }
    for name, make in methods.items():
        yield f"{name} repeats bit for bit", lambda make=make: repeats(make, device)  # type: ignore[misc]
    yield "DGC on the GPU has the CPU's bits", lambda: dgc_is_alike(device)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Use the reference backend instead of Triton's."""
    kernels.use("reference")
    try:
        yield
    finally:
        kernels.use("triton")


def payloads_are_alike(form: SparseFormat, device: torch.device) -> None:
    here = Codec(form, 20_000, 0.02, device, ranks=3)
    with plain_torch():
        there = Codec(form, 20_000, 0.02, CPU, ranks=3)
    for ours, theirs in zip(here.payloads, there.payloads, strict=True):
        assert torch.equal(ours.cpu(), theirs), "the payloads differ"
    for mine, expected in zip(here.parts, there.parts, strict=True):
        assert torch.equal(mine.indices.cpu(), expected.indices) and same_bits(mine.values, expected.values)


def repeats(make: Callable[[], Compressor], device: torch.device) -> None:
    for first, again in zip(results(make(), device), results(make(), device), strict=True):
        assert same_bits(first, again), "a second run gives other bits"


def dgc_is_alike(device: torch.device) -> None:
    def make() -> Compressor:
        return DGCCompressor(0.02, DGCSGDMemory(0.9))

    with plain_torch():
        expected = results(make(), CPU)
    for ours, theirs in zip(results(make(), device), expected, strict=True):
        assert same_bits(ours, theirs), "the CPU gives other bits"


def results(compressor: Compressor, device: torch.device) -> list[Tensor]:
    """Return the results of some steps, and the residual after them."""
    whole, found = Whole("", compressor, [SHAPES], device), []
    for step in range(STEPS):
        given = random_gradients([SHAPES], step, device)
        for result, bucket in zip(whole.step(given), whole.buckets, strict=True):
            assert result.nonfinite is None, result.nonfinite
            if isinstance(result, SparseResult):  # a GPU writes the mean at once
                result.write_to(bucket)
            found.append(bucket.flat.clone())
    return [*found, *whole.states.errors()]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))
