"""The workloads of `benchmarks.gpu`: codecs, whole steps of methods without a network, and a training step.

With the host operations of a step: kernels launched, and waits for the device; and with the laws: those of the
Triton kernels on a real device (tests/kernels/test_triton*.py), and bits of whole steps.
"""

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import dgc.kernels as kernels
from benchmarks.harness import in_turns, middle
from benchmarks.stand_ins import cases, load_tests
from benchmarks.step_methods import Ours
from dgc.bucket import Bucket, Segment, lay_out
from dgc.comm import RunningConversation, TrafficMeter, Transport, all_gather_object
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.requests import AllGather, AllToAll, Conversation, next_requests
from dgc.compression import (
    BlockwiseCompressor,
    DGCCompressor,
    PowerSGDCompressor,
    QSGDCompressor,
    ScaledSignCompressor,
    SparseCompressor,
    TernGradCompressor,
    ThresholdCompressor,
    TwoPhaseCompressor,
)
from dgc.compression.cuda_graphs import SWITCH, StepGraph
from dgc.compression.protocol import Compressor, Result, SparseResult
from dgc.engine.loop import SideStream
from dgc.engine.state import BucketStates
from dgc.kernels import Merged, SparseVector
from dgc.kernels.triton_tables import Launcher, bytes_moved
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from dgc.selection import Predicted, plan_selection
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


@contextmanager
def peak_memory(device: torch.device) -> Iterator[dict[str, float]]:
    """Afterwards the dict has, for a GPU, the most megabytes that were allocated inside, besides those before."""
    found: dict[str, float] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    yield found
    if device.type == "cuda":
        found["peak MB"] = (torch.cuda.max_memory_allocated(device) - before) / 1e6


def stress(
    transport: Transport, device: torch.device, steps: int, scale: int, is_over: Callable[[], bool]
) -> float:
    """Return milliseconds of a step of DGC with three buckets, of about 13,000 scale^2 elements together.

    Every rank checks the headers and checksums of all payloads. The means of all ranks are compared.

    Args:
        is_over: Whether to end before `steps`. Collective, called every 100 steps.

    Raises:
        RuntimeError: A payload has changed, or the means differ.
    """
    shapes: list[Shapes] = [[(64 * scale, 30 * scale)], [(100 * scale, 100 * scale), (500,)], [(40, 33)]]
    whole, meter = Whole("", DGCCompressor(0.01, DGCSGDMemory(0.9)), shapes, device), TrafficMeter()
    generator, sums = torch.Generator(device).manual_seed(transport.rank), []
    for bucket in whole.buckets:
        whole.states.add(bucket, transport.size, transport.rank)
    start, done = time.perf_counter(), 0
    while done < steps and not (done % 100 == 0 and is_over()):
        running = []
        for bucket in whole.buckets:
            for i, segment in enumerate(bucket.segments):
                bucket.use_gradient(i, torch.randn(segment.numel, generator=generator, device=device))
            reducing = whole.states.reduce(bucket)
            running.append((RunningConversation(f"stress.{bucket.name}", reducing, transport, meter), bucket))
        for conversation, bucket in running:
            result = conversation.finish()
            assert result.nonfinite is None, result.nonfinite
            if isinstance(result, SparseResult):
                result.write_to(bucket)
            bits = bucket.flat.view(torch.int32)
            sums.append((bits * torch.arange(1, 2 * bits.numel(), 2, device=device)).sum())
        done += 1
        if done % 100 == 0 or done == steps:
            found = all_gather_object(transport, torch.stack(sums).tolist())
            if found.count(found[0]) < len(found):
                raise RuntimeError(
                    f"ranks have other means than rank 0 in the last {len(sums) // 3} of {done} steps"
                )
            sums.clear()
    return 1e3 * (time.perf_counter() - start) / max(1, done)


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

    Triton's interpreter uses PyTorch for itself. That is not counted. With tensors of the device "meta" no kernel
    runs, and `moved` has the bytes that are read and written, by kernel (`dgc.kernels.triton_tables.moves`) or
    operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.operations = 0
        self.moved: Counter[str] = Counter()

    def __enter__(self) -> "Launches":
        launch = Launcher.__call__

        def counted(launcher: Launcher, kernel: Any, near: Tensor, programs: int, *arguments: object) -> None:
            self.kernels += programs > 0
            if near.device.type == "meta":
                self.moved[kernel.fn.__name__] += sum(bytes_moved(kernel, programs, arguments))
                return
            with _disable_current_modes():
                launch(launcher, kernel, near, programs, *arguments)

        self._patch = patch.object(Launcher, "__call__", counted)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name not in FREE:
            self.operations += 1
            self.moved[name] += sum(t.nbytes for t in tree_leaves((args, result)) if isinstance(t, Tensor))
        return result


COUNTED: dict[str, Callable[[], Compressor]] = {
    "DGC, fp16 and int32": lambda: DGCCompressor(0.002, DGCSGDMemory(0.9), values="fp16", indices="int32"),
    "DGC, fp32 and int64": lambda: DGCCompressor(0.002, DGCSGDMemory(0.9)),
    "DGC, 2 bits and packed": lambda: DGCCompressor(0.002, DGCSGDMemory(0.9), values="2bit", indices="packed"),
    "DGC, sign and Rice": lambda: DGCCompressor(0.002, DGCSGDMemory(0.9), values="sign", indices="rice"),
    "top-k, bf16 and int32": lambda: SparseCompressor(0.002, ResidualMemory(), values="bf16", indices="int32"),
    "scaled signs": ScaledSignCompressor,
    "2 bits": lambda: ThresholdCompressor(wire="gather"),
    "QSGD": QSGDCompressor,
    "TernGrad": TernGradCompressor,
    "int8 blocks": BlockwiseCompressor,
    "two phases, int8": TwoPhaseCompressor,
    "two phases, int4": lambda: TwoPhaseCompressor(4),
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
    if isinstance(request, AllToAll):
        request = AllGather(request.tensor[: request.splits[0]])
    if isinstance(request, AllGather):
        return torch.stack([request.tensor] * ranks).unbind()
    return request.tensor.clone()


def bytes_of_dgc(layout: Sequence[Sequence[Segment]], form: SparseFormat, ratio: float = 0.001) -> Counter[str]:
    """Return the bytes that a step of DGC moves from its gradients to its payloads, by kernel or operation.

    It is the step whose time is measured, with tensors of the device "meta", which have no memory. What depends on
    the data, such as the number of candidates in a tile, counts with its largest number.
    """
    ours = Ours("triton", Predicted(), layout, ratio, 0.9, form, "meta")
    gradients = [torch.empty(sum(sizes), device="meta") for sizes in ours.sizes]
    for _ in range(3):  # the first steps have no history
        with Launches() as launches:
            ours.step(gradients)
    return launches.moved


TESTS = ROOT / "tests" / "kernels"
LAWS = ("triton", "triton_blocks", "triton_codec", "triton_elements", "triton_lowrank")
LEFT_OUT = {
    "test_every_kernel_compiles_for_gpus": "compiles for other GPUs than this one",
    "test_importing_dgc_does_not_import_triton": "says nothing of the device",
}
SHAPES = [(64, 300), (40, 33), (500,), (64, 300)]
STEPS = 4
CPU = torch.device("cpu")


def laws(device: torch.device) -> Iterator[tuple[str, Callable[[], None]]]:
    for subject in LAWS:
        left_out = LEFT_OUT if subject == LAWS[0] else {}
        yield from cases(load_tests(TESTS / f"test_{subject}.py"), left_out)
    for name, form in FORMATS.items():
        yield f"payload of {name} has the CPU's bits", lambda form=form: payloads_are_alike(form, device)  # type: ignore[misc]
    methods: dict[str, Callable[[], Compressor]] = {
        "DGC": make_dgc,
        "PowerSGD": lambda: PowerSGDCompressor(2, 0),
    }
    for name, make in methods.items():
        yield f"{name} repeats bit for bit", lambda make=make: repeats(make, device)  # type: ignore[misc]
    yield "DGC on the GPU has the CPU's bits", lambda: dgc_is_alike(device)
    yield "DGC as a CUDA graph has the same bits", lambda: graph_is_alike(device)


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
    with plain_torch():
        expected = results(make_dgc(), CPU)
    for ours, theirs in zip(results(make_dgc(), device), expected, strict=True):
        assert same_bits(ours, theirs), "the CPU gives other bits"


def graph_is_alike(device: torch.device) -> None:
    """Of a bucket whose gradients are copied, because their addresses change."""
    with plain_torch():
        expected = results(make_dgc(), CPU, [(40, 33)], 12)
    side = SideStream(device) if device.type == "cuda" else None
    run = patch.object(StepGraph, "run", autospec=True, side_effect=StepGraph.run)
    with run as runs, patch.dict(os.environ, {SWITCH: "1"}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with side.after_caller() if side else nullcontext():
            found = results(make_dgc(), device, [(40, 33)], 12)
    if side:
        side.join()
        assert runs.call_args.args[0].captures == 1, "no graph was captured"
    for ours, theirs in zip(found, expected, strict=True):
        assert same_bits(ours, theirs), "the graph gives other bits"


def make_dgc() -> Compressor:
    return DGCCompressor(0.02, DGCSGDMemory(0.9))


def results(
    compressor: Compressor, device: torch.device, shapes: Shapes = SHAPES, steps: int = STEPS
) -> list[Tensor]:
    """Return the results of some steps, and the residual after them."""
    whole, found = Whole("", compressor, [shapes], device), []
    for step in range(steps):
        given = random_gradients([shapes], step, device)
        for result, bucket in zip(whole.step(given), whole.buckets, strict=True):
            assert result.nonfinite is None, result.nonfinite
            if isinstance(result, SparseResult):  # a GPU writes the mean at once
                result.write_to(bucket)
            found.append(bucket.flat.clone())
    return [*found, *whole.states.errors()]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))
