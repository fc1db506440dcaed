"""The parts of `benchmarks.gpu`: workloads, host operations of a step, invariants, and the table.

Workloads are codecs, whole steps of methods without a network, and a training step. Host operations are kernels
launched, and waits for the device. Invariants are the tests of the Triton kernels on a real device
(tests/kernels/test_triton*.py), and the comparison of the bits of whole steps.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import dgc.kernels as kernels
from benchmarks import _gpt2, step_overhead
from benchmarks._harness import Table, in_turns, middle, ratio, to_json
from benchmarks._launches import run_ranks
from benchmarks._stand_ins import cases, load_tests
from benchmarks.ddp_step import whole_steps
from benchmarks.step_overhead import Copy, Ours, Pass, Step, TopK
from dgc import comm, compression
from dgc.comm import RunningConversation, TrafficMeter, Transport, all_gather_object
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.requests import AllGather, AllToAll, Conversation, next_requests, reply_of_one
from dgc.comm.staging import StagedTransport
from dgc.comm.torch_distributed import TorchTransport
from dgc.core.bucket import Bucket, Segment, lay_out
from dgc.core.graphs import SWITCH, StepGraphs
from dgc.core.protocol import Compressor
from dgc.core.results import Result, SparseResult, explained, joined
from dgc.engine.loop import SideStream
from dgc.engine.state import BucketStates
from dgc.kernels import Merged, SparseVector
from dgc.kernels.codes import CodeLayout, _layouts
from dgc.kernels.launch import Launcher, bytes_moved
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from dgc.sparse.payloads import (
    CastValues,
    Int8Values,
    PackedIndices,
    PlainIndices,
    RiceIndices,
    SignValues,
    SparseFormat,
)
from dgc.sparse.payloads.payload import PayloadPlan
from dgc.sparse.selectors import Predicted, quota_of

FORMATS = {
    "fp16 values, int32 indices": SparseFormat(CastValues("fp16"), PlainIndices("int32")),
    "int8 values, packed indices": SparseFormat(Int8Values(), PackedIndices()),
    "sign values, Rice indices": SparseFormat(SignValues(), RiceIndices()),
}
Shapes = Sequence[tuple[int, ...]]
Make = Callable[[], Compressor]
Do = Callable[[], object]


def random_gradients(buckets: Sequence[Shapes], seed: int, device: torch.device) -> list[Tensor]:
    """Return one flat tensor per bucket, with equal values on every device."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [sum(torch.Size(shape).numel() for shape in shapes) for shapes in buckets]
    return [torch.randn(size, generator=generator).to(device) for size in sizes]


def segments_of(shapes: Shapes) -> tuple[Segment, ...]:
    return lay_out([(str(i), torch.empty(shape, device="meta")) for i, shape in enumerate(shapes)])


class Codec:
    """Payloads of `ranks` ranks for one bucket, with different random elements for each rank."""

    def __init__(self, form: SparseFormat, numel: int, density: float, device: torch.device, ranks: int):
        self.form, self.numel = form, numel
        self.codec = kernels.of(torch.empty(0, device=device)).codec
        self.quota = quota_of(lay_out([("a", torch.empty(numel, device="meta"))]), density, device)
        self.none = torch.full((), numel, dtype=torch.int64, device=device)
        self.payload = PayloadPlan(self.form, self.quota.per_tensor, numel)
        self.selections = [self._selection(rank, device) for rank in range(ranks)]
        self.payloads = [self._encode(selection) for selection in self.selections]
        self.parts = self.decode()

    def _selection(self, rank: int, device: torch.device) -> SparseVector:
        generator, k = torch.Generator().manual_seed(rank), self.quota.capacity
        indices = torch.randperm(self.numel, generator=generator)[:k].sort().values.int()
        values, count = torch.randn(k, generator=generator), torch.tensor(k, dtype=torch.int32)
        return SparseVector(*(part.to(device) for part in (indices, values, count)))

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
            requests = next_requests(conversation, tuple(map(reply_of_one, requests)))
    except StopIteration as stop:
        result: Result = stop.value
        return result


def check_reports(results: Sequence[Result]) -> None:
    """Read once what the device reports of all results, as at the end of a step.

    Raises:
        RuntimeError: A gradient or a mean is not finite.
    """
    reports = [report for result in results for report in result.reports]
    said = explained(reports, joined(reports, []).tolist()) if reports else None
    said = said or next((result.nonfinite for result in results if result.nonfinite is not None), None)
    if said is not None:
        raise RuntimeError(said)


def suppose_layouts(bounds: Iterable[Tensor]) -> None:
    """Let codes of segments with bounds on the device "meta" have some size, because it cannot be read."""
    for each in bounds:
        if each.is_meta:
            some = CodeLayout(torch.empty_like(each[:-1]), 1 << 20)
            _layouts[each] = {(width, 1 << unit): some for width in (1, 2, 4, 8) for unit in range(10)}


class Whole:
    """A step of a compressor over all buckets: gradient in, mean and residual out, with its read at the end."""

    def __init__(self, compressor: Compressor, buckets: Sequence[Shapes], device: torch.device):
        self.states = BucketStates(compressor)
        self.buckets = [
            Bucket(f"bucket{b}", segments_of(shapes), torch.float32, device) for b, shapes in enumerate(buckets)
        ]
        for bucket in self.buckets:
            suppose_layouts([bucket.bounds])
            self.states.add(bucket, 1, 0)
            suppose_layouts(self.states[bucket].constants.values())
        self.begun: list[tuple[Any, Any]] = []
        self.side = SideStream(device) if device.type == "cuda" else None

    def step(self, gradients: Sequence[Tensor]) -> list[Result]:
        results = self.reduce(gradients)
        check_reports(results)
        return results

    def reduce(self, gradients: Sequence[Tensor]) -> list[Result]:
        """Do the step but for the read at its end."""
        self.place(gradients)
        return self.exchange()

    def place(self, gradients: Sequence[Tensor]) -> None:
        """Let the buckets use these gradients, as backward does."""
        for bucket, flat in zip(self.buckets, gradients, strict=True):
            for i, part in enumerate(flat.split([segment.numel for segment in bucket.segments])):
                bucket.use_gradient(i, part)

    def exchange(self) -> list[Result]:
        """Exchange beside the current stream, as engines do, because that may be one without CUDA graphs."""
        with self.side.after_caller() if self.side else nullcontext():
            results = [alone(self.states.reduce(bucket)) for bucket in self.buckets]
        if self.side:
            self.side.join()
        return results

    def begin(self) -> None:
        """Exchange until the first requests."""
        self.begun = [(talk, next_requests(talk)) for talk in map(self.states.reduce, self.buckets)]

    def end(self) -> None:
        """Exchange from the first requests on."""
        for conversation, requests in self.begun:
            with suppress(StopIteration):
                while True:
                    requests = next_requests(conversation, tuple(map(reply_of_one, requests)))


class Training:
    """Forward, backward and step of a small network. Gradients are exchanged during backward."""

    def __init__(self, width: int, device: torch.device):
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device)
        self.x = torch.randn(32, width, generator=torch.Generator().manual_seed(0)).to(device)
        inner = DGCSGD(self.net.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
        named, method = self.net.named_parameters(), make_dgc(0.001)
        mb, (transport,) = 8 * width * width / 2**20, LockstepWorld(1).transports
        self.optimizer = DistributedOptimizer(inner, named, method, bucket_mb=mb, transport=transport)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(self.x).square().mean().backward()
        self.optimizer.step()


class Times(NamedTuple):
    """Milliseconds of a step, with the device idle before it: median, worst, and median until Python returns."""

    ms: float
    worst: float
    host: float


def times_of(step: Do, device: torch.device, rounds: int, warm_up: int = 3, before: Do = lambda: None) -> Times:
    """Measure a step. before: what is done before each measurement."""

    def once(number: int) -> tuple[float, float]:
        before()
        step_overhead.wait(device.type)
        start = time.perf_counter()
        step()
        returned = time.perf_counter()
        step_overhead.wait(device.type)
        return 1e3 * (time.perf_counter() - start), 1e3 * (returned - start)

    found = in_turns({"": once}, rounds, warm_up)[""].values()
    whole, host = zip(*found, strict=True)
    return Times(median(whole), max(whole), median(host))


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
    """
    shapes: list[Shapes] = [[(64 * scale, 30 * scale)], [(100 * scale, 100 * scale), (500,)], [(40, 33)]]
    whole, meter = Whole(make_dgc(0.01), shapes, device), TrafficMeter()
    beside = whole.side.after_caller if whole.side else nullcontext
    generator, sums = torch.Generator(device).manual_seed(transport.rank), []
    for bucket in whole.buckets:
        whole.states.add(bucket, transport.size, transport.rank)
    start, done = time.perf_counter(), 0
    while done < steps and not (done % 100 == 0 and is_over()):
        running = []
        for bucket in whole.buckets:
            for i, segment in enumerate(bucket.segments):
                bucket.use_gradient(i, torch.randn(segment.numel, generator=generator, device=device))
            with beside():
                reducing = whole.states.reduce(bucket)
                running.append((RunningConversation(f"stress.{bucket.name}", reducing, transport, meter), bucket))
        for conversation, bucket in running:
            with beside():
                result = conversation.finish()
                check_reports([result])
            if whole.side:
                whole.side.join()
            if isinstance(result, SparseResult):
                result.write_to(bucket)
            bits = bucket.flat.view(torch.int32)
            sums.append((bits * torch.arange(1, 2 * bits.numel(), 2, device=device)).sum())
        done += 1
        if done % 100 == 0 or done == steps:
            found = all_gather_object(transport, torch.stack(sums).tolist())
            if found.count(found[0]) < len(found):
                last = f"in the last {len(sums) // 3} of {done} steps"
                raise RuntimeError(f"ranks have other means than rank 0 {last}")
            sums.clear()
    return 1e3 * (time.perf_counter() - start) / max(1, done)


ROOT = Path(__file__).parents[1]
MESSAGE = "called a synchronizing CUDA operation"
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class Counts(NamedTuple):
    """Counts of a step.

    waits: waits that PyTorch reports, by place. launches: of PyTorch's and Triton's kernels; 0 if the profiler
    cannot see the GPU. driver_waits: all waits in the profile, from any caller. device: microseconds and calls of
    each kernel and copy on the device.
    """

    waits: Counter[str]
    launches: int = 0
    driver_waits: int = 0
    device: Mapping[str, tuple[float, int]] = {}


def count(step: Do, device: torch.device) -> Counts:
    """Count in two calls, the first under PyTorch's check for waits, the second under its profiler."""
    if device.type != "cuda":
        step()
        return Counts(Counter())
    waits = waits_of(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize(device)
    averages = profiler.key_averages()
    events = {event.key: event.count for event in averages}
    # older versions of torch have another name for the time
    on_device = {
        event.key: (float(getattr(event, "self_device_time_total", 0.0)), event.count)
        for event in averages
        if str(event.device_type).endswith("CUDA")
    }
    launches, driver_waits = (sum(events.get(name, 0) for name in names) for names in (LAUNCHES, WAITS))
    return Counts(waits, launches, driver_waits, on_device)


def waits_of(step: Do) -> Counter[str]:
    """Return file and line of each operation that waits, and its count."""

    def place(filename: str) -> str:
        path = Path(filename)
        return str(path.relative_to(ROOT)) if ROOT in path.parents else path.name

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
    runs, and `moved` has the bytes that are read and written, by kernel (`dgc.kernels.launch.moves`) or
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


def make_dgc(ratio: float = 0.02, **formats: Any) -> Compressor:
    return compression.DGCCompressor(ratio, DGCSGDMemory(0.9), **formats)


COUNTED: dict[str, Make] = {
    "DGC, fp16 and int32": lambda: make_dgc(0.002, values="fp16", indices="int32"),
    "DGC, fp32 and int64": lambda: make_dgc(0.002),
    "DGC, 2 bits and packed": lambda: make_dgc(0.002, values="2bit", indices="packed"),
    "DGC, sign and Rice": lambda: make_dgc(0.002, values="sign", indices="rice"),
    "top-k, bf16 and int32": lambda: compression.SparseCompressor(
        0.002, ResidualMemory(), values="bf16", indices="int32"
    ),
    "scaled signs": compression.ScaledSignCompressor,
    "2 bits": lambda: compression.ThresholdCompressor(wire="gather"),
    "QSGD": compression.QSGDCompressor,
    "int8 blocks": compression.BlockwiseCompressor,
    "two phases, int8": compression.TwoPhaseCompressor,
    "two phases, int4": lambda: compression.TwoPhaseCompressor(4),
    "PowerSGD, rank 4": lambda: compression.PowerSGDCompressor(4, 0),
}
COUNTED_SHAPES = [(12, 20)] * 2  # small, because a CPU interprets the kernels


def launches_of(make: Make, ranks: int, device: torch.device) -> tuple[Launches, Launches]:
    """Count the launches of one bucket's step: until its first request, and from then on."""
    whole, encoding, decoding = Whole(make(), [COUNTED_SHAPES], device), Launches(), Launches()
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

    What depends on the data, such as the number of candidates in a tile, counts with its largest number.
    """
    ours = Ours("triton", Predicted(), layout, ratio, 0.9, form, "meta")
    gradients = [torch.empty(sum(sizes), device="meta") for sizes in ours.sizes]
    for _ in range(3):  # the first steps have no history
        with Launches() as launches:
            ours.step(gradients)
    return launches.moved


PAYLOAD = "DGC: gradient in, payload out"
AS_GRAPHS = ", graphs"
MOST_CALLS = {PAYLOAD: 320, PAYLOAD + AS_GRAPHS: 150}  # of Python and C


class NoGraph:
    """In the place of a CUDA graph on the device "meta"."""

    def replay(self) -> None:
        pass

    @staticmethod
    @contextmanager
    def capture(*arguments: Any, **options: Any) -> Iterator[None]:
        yield


@contextmanager
def graphs_on_meta() -> Iterator[None]:
    """Let graphs of buckets on the device "meta" do nothing."""
    with (
        patch.object(torch.cuda, "CUDAGraph", NoGraph),
        patch.object(torch.cuda, "graph", NoGraph.capture),
        patch.object(torch.cuda, "graph_pool_handle", lambda: None),
        patch.object(torch.cuda, "current_stream", lambda device: None),
    ):
        yield


class HostStep(NamedTuple):
    """A step, and what is done before and after it without being measured."""

    step: Do
    before: Do = lambda: None
    after: Do = lambda: None


def host_steps(names: Sequence[str] = ()) -> dict[str, HostStep]:
    """Steps of ResNet-50's gradients in 4 buckets of 25 MB on the device "meta", without the read at their end.

    The buckets have the gradients before a step. names: of the steps to make, by default all.
    """
    layout, meta = step_overhead.plan_buckets(step_overhead.resnet50()), torch.device("meta")
    form = FORMATS["fp16 values, int32 indices"]
    ours = Ours("triton", Predicted(), layout, 0.001, 0.9, form, "meta")
    gradients = [torch.empty(sum(sizes), device=meta) for sizes in ours.sizes]
    shapes = [[segment.shape for segment in bucket] for bucket in layout]
    methods: dict[str, Make] = {
        "DGC: gradient in, mean out": partial(make_dgc, 0.001, values="fp16", indices="int32"),
        "DGC, sign and Rice": partial(make_dgc, 0.001, values="sign", indices="rice"),
        "PowerSGD, rank 4": lambda: compression.PowerSGDCompressor(4, 0),
        "two phases, 8 bits": compression.TwoPhaseCompressor,
        "scaled signs": compression.ScaledSignCompressor,
        "QSGD": compression.QSGDCompressor,
    }
    steps = {PAYLOAD: HostStep(partial(ours.step, gradients))}
    for graphs, ending in ((lambda bucket: None, ""), (StepGraphs, AS_GRAPHS)):
        for name, make in {PAYLOAD: methods["DGC: gradient in, mean out"], **methods}.items():
            if (names and name + ending not in names) or name + ending in steps:
                continue
            with patch("dgc.engine.state.graphs_of", graphs):
                whole = Whole(make(), shapes, meta)
            place = partial(whole.place, gradients)
            if name == PAYLOAD:
                steps[name + ending] = HostStep(whole.begin, place, whole.end)
            else:
                steps[name + ending] = HostStep(whole.exchange, place)
    return steps


def host_cost(step: HostStep, repeats: int) -> dict[str, Any]:
    """Return milliseconds of a core, and calls of Python and C, of a step with launches replaced by nothing.

    A call from C, such as a mapped one, does not count.
    """
    calls, times = Counter[str](), list[float]()

    def note(frame: Any, event: str, argument: Any) -> None:
        calls[event] += 1

    for _ in range(8):  # tables are made, also of PowerSGD's other half step, and graphs
        step.before()
        step.step()
        step.after()
    for _ in range(repeats):
        step.before()
        start = time.process_time()
        step.step()
        times.append(1e3 * (time.process_time() - start))
        step.after()
    step.before()
    sys.setprofile(note)
    try:
        step.step()
    finally:
        sys.setprofile(None)
    step.after()
    return {"ms": median(times), "calls": calls["call"] + calls["c_call"]}


def host_costs(names: Sequence[str] = (), repeats: int = 100) -> dict[str, dict[str, Any]]:
    """Return the costs of steps by name, by default of all."""
    nothing = patch.object(Launcher, "__call__", lambda *arguments: None)
    with nothing, patch.object(kernels, "_asked", "triton"), graphs_on_meta():
        steps = host_steps(names)
        return {name: host_cost(steps[name], repeats) for name in names or steps}


TESTS = ROOT / "tests" / "kernels"
LAWS = ("triton", "triton_selection", "triton_codec", "triton_elements", "triton_lowrank")
LEFT_OUT = {
    "test_every_kernel_compiles_for_gpus": "compiles for other GPUs than this one",
    "test_importing_dgc_does_not_import_triton": "says nothing of the device",
}
SHAPES = [(64, 300), (40, 33), (500,), (64, 300)]
CPU = torch.device("cpu")


def laws(device: torch.device) -> Iterator[tuple[str, Callable[[], None]]]:
    for subject in LAWS:
        left_out = LEFT_OUT if subject == LAWS[0] else {}
        yield from cases(load_tests(TESTS / f"test_{subject}.py"), left_out)
    for name, form in FORMATS.items():
        yield f"payload of {name} has the CPU's bits", lambda form=form: payloads_are_alike(form, device)  # type: ignore[misc]
    methods: dict[str, Make] = {"DGC": make_dgc, "PowerSGD": lambda: compression.PowerSGDCompressor(2, 0)}
    for name, make in methods.items():
        yield f"{name} repeats bit for bit", lambda make=make: repeats(make, device)  # type: ignore[misc]
    yield "DGC on the GPU has the CPU's bits", lambda: dgc_is_alike(device)
    for name, make in GRAPHS.items():
        yield f"{name} as CUDA graphs has the same bits", lambda make=make: graphs_are_alike(make, device)  # type: ignore[misc]


AS_LAWS = "as-laws"
MOST_PROCESSES = 12  # of laws: most of the time of a law is Python's and the compiler's


def run_laws(module: str, parts: "Parts", device: torch.device, share: float, processes: int) -> int:
    """Run the laws in several processes until this share of the time is over. Returns how many were run.

    module: its `main` calls `work_on_laws` if the first word is AS_LAWS.
    """
    names, found = [name for name, _ in laws(device)], dict[str, str]()
    with TemporaryDirectory(prefix="laws-") as folder:
        files = [Path(folder, str(k)) for k in range(processes)]
        words = [[AS_LAWS, str(k), str(processes), str(parts.left(share)), device.type] for k in range(processes)]
        commands = [
            [sys.executable, "-m", module, *each, str(file)] for each, file in zip(words, files, strict=True)
        ]
        started = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
        try:
            for process in started:
                # a law that has begun may end later
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(1.0, parts.left(share) + 30))
        finally:
            for process in started:
                process.kill()
                process.wait()
        for file in files:
            lines = file.read_text().splitlines() if file.exists() else []
            found.update(json.loads(line) for line in lines if line.endswith("]"))
    ended = [process.returncode for process in started]
    for name in names:
        if name not in found:
            parts.not_run.append(name)
        elif found[name]:
            parts.fail(name, found[name])
    if any(code > 0 for code in ended):
        parts.fail("the processes of the laws", f"they ended with {ended}")
    return len(found)


def work_on_laws(k: int, processes: int, seconds: float, device: torch.device, file: Path) -> None:
    """Run each law whose number modulo `processes` is k.

    Each adds a line to `file` with its name and why it failed, or "".
    """
    end = time.monotonic() + seconds
    for number, (name, law) in enumerate(laws(device)):
        if number % processes != k:
            continue
        if time.monotonic() > end:
            return
        try:
            law()
            reason = ""
        except (Exception, SystemExit):
            reason = traceback.format_exc(limit=-3) or "it failed"
        with file.open("a") as out:
            out.write(to_json([name, reason]) + "\n")


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
    assert alike(here.payloads, there.payloads), "the payloads differ"
    for mine, expected in zip(here.parts, there.parts, strict=True):
        assert torch.equal(mine.indices.cpu(), expected.indices) and same_bits(mine.values, expected.values)


def repeats(make: Make, device: torch.device) -> None:
    assert alike(results(make(), device), results(make(), device)), "a second run gives other bits"


def dgc_is_alike(device: torch.device) -> None:
    with plain_torch():
        expected = results(make_dgc(), CPU)
    assert alike(results(make_dgc(), device), expected), "the CPU gives other bits"


GRAPHS: dict[str, Make] = {
    "DGC": make_dgc,
    "DGC, sign and Rice": lambda: make_dgc(values="sign", indices="rice"),
    "scaled signs": compression.ScaledSignCompressor,
    "QSGD": lambda: compression.QSGDCompressor(error_feedback=True),
    "int8 blocks": compression.BlockwiseCompressor,
    "two phases": compression.TwoPhaseCompressor,
    "PowerSGD": lambda: compression.PowerSGDCompressor(2, 0),
}


def graphs_are_alike(make: Make, device: torch.device) -> None:
    """Of a bucket whose gradients are copied, because their addresses change."""
    run, found = patch.object(StepGraphs, "reduce", autospec=True, side_effect=StepGraphs.reduce), {}
    for switch in ("0", "1"):
        with run as runs, patch.dict(os.environ, {SWITCH: switch}), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found[switch] = results(make(), device, [(40, 33)], 14)
            if switch == "1" and device.type == "cuda":
                assert runs.call_args.args[0].captures == 1, "no graph was captured"
    assert alike(found["1"], found["0"]), "the graphs give other bits"


def results(compressor: Compressor, device: torch.device, shapes: Shapes = SHAPES, steps: int = 4) -> list[Tensor]:
    """Return the results of some steps, and the residual after them."""
    whole, found = Whole(compressor, [shapes], device), []
    for step in range(steps):
        given = random_gradients([shapes], step, device)
        for result, bucket in zip(whole.step(given), whole.buckets, strict=True):
            if isinstance(result, SparseResult):  # a GPU writes the mean at once
                result.write_to(bucket)
            found.append(bucket.flat.clone())
    return [*found, *whole.states.errors()]


def alike(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


BEGIN, END = "<!-- the table of make gpu -->", "<!-- its end -->"
DGC_STEP, TARGET, MOST_LAUNCHES = "DGC: gradient in, payload out", 1.3, 8
DGC_BYTES, POWERSGD_BYTES = 20, 16  # per parameter
RANKS = (2, 8, 64)
COUNTED_RANKS = (2, 8)  # launches are as many for both, and an interpreted one takes time for each rank
SMALL: list[Shapes] = [[(100, 100), (64,)], [(50, 60)]]
NCCL = "cpu:gloo,cuda:nccl"
FORMS = {"ms": "10.3f", "worst": "10.3f", "host": "9.3f", "device": "9.3f", "GB/s": "8.0f", "/ copy": "8.2f"}
FORMS |= {"launches": "10d", "waits": "7d", "peak MB": "9.0f"}
KERNELS = 12  # that are printed of a step


class Parts:
    """Runs the parts of the benchmark until `minutes` are over. What fails is printed, and the rest goes on."""

    def __init__(self, minutes: float):
        self._end, self._seconds = time.monotonic() + 60 * minutes, 60 * minutes
        self.failed: list[str] = []
        self.not_run: list[str] = []

    def left(self, share: float = 1.0) -> float:
        """The seconds until a share of the time is over."""
        return self._end - time.monotonic() - (1 - share) * self._seconds

    def run(self, name: str, part: Do, share: float = 1.0) -> None:
        """Run a part, unless this share of the time is over."""
        if self.left(share) <= 0:
            self.not_run.append(name)
            return
        try:
            part()
        except (Exception, SystemExit):  # SystemExit: a rank has failed
            self.fail(name, traceback.format_exc(limit=-3))

    def fail(self, name: str, reason: str) -> None:
        self.failed.append(name)
        print(f"FAILED {name}\n{reason}", flush=True)


class Rows(Table):
    """The table. Each row is a part of its own. `copy_rate` is the rate of a copy in GB/s, once it is measured.

    keep: called after each row with all rows, so that they are kept if the time ends.
    """

    def __init__(
        self,
        parts: Parts,
        device: torch.device,
        rounds: int,
        keep: Callable[[Mapping[str, Mapping[str, Any]]], None] = lambda rows: None,
    ) -> None:
        super().__init__("", 42, [(head, head, form) for head, form in FORMS.items()])
        self.parts, self.device, self.rounds, self.copy_rate, self.keep = parts, device, rounds, math.nan, keep

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        super().add(name, row)
        self.keep(self.rows)

    def measure(self, name: str, make: Callable[[], Do], traffic: float = 0, before: Do = lambda: None) -> None:
        """Add the row of a step.

        Args:
            make: Returns the step.
            traffic: Least bytes that it moves in memory.
            before: What is done before each measurement.
        """

        def part() -> None:
            with peak_memory(self.device) as peak:
                step = make()
                times = times_of(step, self.device, self.rounds, self.rounds // 9, before)
            self.measured(name, times.ms, step, traffic, {"worst": times.worst, "host": times.host, **peak})

        self.parts.run(name, part)

    def measured(self, name: str, ms: float, step: Do, traffic: float, more: Mapping[str, float] = {}) -> None:
        """Add a row, and print the places where the host waits in this step, and its kernels. more: of the row."""
        counts, rate = count(step, self.device), traffic / ms / 1e6
        row: dict[str, Any] = {"ms": ms, "launches": counts.launches, "waits": sum(counts.waits.values()), **more}
        row |= {"GB/s": rate, "/ copy": self.copy_rate / rate} if traffic else {}
        if counts.device:
            row["device"] = sum(us for us, _ in counts.device.values()) / 1e3
        kernels_of = sorted(counts.device.items(), key=lambda item: -item[1][0])
        row |= {"driver_waits": counts.driver_waits, "where": dict(counts.waits), "kernels": dict(kernels_of)}
        self.add(name, row)
        for place, often in counts.waits.most_common():
            print(f"    {often} at {place}")
        for kernel, (us, often) in kernels_of[:KERNELS]:
            print(f"    {us:9.1f} us {often:5} x {kernel[:70]}")


def measure_dgc(table: Rows, buckets: list[Any], warm_up: int) -> dict[str, bool]:
    """Add DGC's step until its payload, and what it is compared with. Return which targets are reached."""
    device, momentum = table.device.type, step_overhead.MOMENTUM
    gradients = step_overhead.Gradients(buckets, device)
    numel = sum(map(sum, gradients.sizes))
    form = FORMATS["fp16 values, int32 indices"]
    ours = Ours("triton", Predicted(), buckets, 0.001, momentum, form, device)
    for _ in range(warm_up):
        ours.step(gradients.next())
    ours.settle()
    passing = Pass("triton", buckets, momentum, device)
    others: list[Step] = [Copy(numel, device), passing, TopK(buckets, 0.001, device)]
    for other in others:
        other.start_from(ours.u, ours.v)
    times = step_overhead.measure([ours, *others], gradients, table.rounds, device)
    copy, floor = (times[other.name] for other in others[:2])
    table.copy_rate = Copy.bytes_per_parameter * numel / middle(copy) / 1e6
    for step in (*others, ours):
        name, traffic = (DGC_STEP, DGC_BYTES) if step is ours else (step.name, step.bytes_per_parameter)
        table.measured(name, middle(times[step.name]), partial(step.step, gradients.next()), traffic * numel)

    def select() -> None:
        for i, gradient in enumerate(gradients.next()):
            ours.select(i, gradient)

    table.measure("DGC: accumulate and select", lambda: select, DGC_BYTES * numel)
    row, most = table.rows[DGC_STEP], MOST_LAUNCHES * len(buckets)
    return {
        f"{DGC_STEP}: waits nowhere": row["waits"] == 0,
        f"{DGC_STEP}: at most {MOST_LAUNCHES} launches per bucket": 0 < row["launches"] <= most,
        f"{DGC_STEP}: at most {TARGET} times the floor": ratio(times[ours.name], floor) <= TARGET,
        f"{DGC_STEP}: at most {TARGET} times a copy's time": row["/ copy"] <= TARGET,
    }


def measure(table: Rows, args: argparse.Namespace, module: str) -> dict[str, bool]:
    """Add all rows. Return which targets are reached. module: starts the ranks."""
    device, reached = table.device, {}
    small = [segments_of(shapes) for shapes in SMALL]
    buckets = small if args.dry_run else step_overhead.plan_buckets(step_overhead.resnet50())
    table.parts.run(DGC_STEP, lambda: reached.update(measure_dgc(table, buckets, 2 if args.dry_run else 100)))
    shapes = [[segment.shape for segment in bucket] for bucket in buckets]
    numel, given = sum(s.numel for bucket in buckets for s in bucket), random_gradients(shapes, 0, device)
    generator, scale = torch.Generator(device).manual_seed(1), [1.0]

    def draw() -> None:
        """Gradients of a new step."""
        for flat in given:
            flat.normal_(generator=generator)

    def jump() -> None:
        """Gradients that are 30 times as large as in the step before, or a thirtieth."""
        draw()
        scale[0] = 31.0 - scale[0]
        for flat in given:
            flat.mul_(scale[0])

    def vanish() -> None:
        """Gradients of zeros, and of new numbers in every other step."""
        draw()
        scale[0] = 1.0 - scale[0]
        for flat in given:
            flat.mul_(scale[0])

    dgc = partial(make_dgc, 0.001, values="fp16", indices="int32")
    methods: dict[str, tuple[Make, int, Do]] = {
        "DGC: gradient in, mean out": (dgc, DGC_BYTES, lambda: None),
        "the same, gradients drawn anew": (dgc, DGC_BYTES, draw),
        "the same, gradients that jump by 30": (dgc, DGC_BYTES, jump),
        "the same, every other gradient 0": (dgc, DGC_BYTES, vanish),
        "DGC, sign and Rice, drawn anew": (
            partial(make_dgc, 0.001, values="sign", indices="rice"),
            DGC_BYTES,
            draw,
        ),
        "PowerSGD, rank 1": (partial(compression.PowerSGDCompressor, 1), POWERSGD_BYTES, draw),
        "PowerSGD, rank 4": (partial(compression.PowerSGDCompressor, 4), POWERSGD_BYTES, draw),
        "two phases, 8 bits": (compression.TwoPhaseCompressor, 0, draw),
        "two phases, 4 bits": (partial(compression.TwoPhaseCompressor, 4), 0, draw),
        "scaled signs": (compression.ScaledSignCompressor, 0, draw),
        "2 bits": (partial(compression.ThresholdCompressor, wire="gather"), 0, draw),
        "QSGD": (compression.QSGDCompressor, 0, draw),
    }
    for name, (make, traffic, before) in methods.items():
        scale[0] = 1.0
        whole = lambda make=make: partial(Whole(make(), shapes, device).step, given)  # noqa: E731
        table.measure(name, whole, traffic * numel, before)
    table.measure("training step, 4 layers", lambda: Training(32 if args.dry_run else 1024, device).step)

    # ranks that share a GPU cannot use NCCL
    nccl = [] if args.dry_run else [(NCCL, min(2, torch.cuda.device_count()))]
    for backend, ranks in nccl if (NCCL, 2) in nccl else [*nccl, ("gloo", 2)]:
        name = f"{ranks} ranks, {backend.split(':')[-1]}"
        table.parts.run(name, partial(measure_ranks, table, module, name, backend, ranks, args))
    for name, form in FORMATS.items():
        codec = cache(partial(Codec, form, 10_000 if args.dry_run else 6_500_000, 0.001, device, ranks=4))
        for what in ("encode", "decode of 4", "merge of 4"):
            table.measure(f"{what}: {name}", lambda codec=codec, what=what: getattr(codec(), what.split()[0]))  # type: ignore[misc]
    return {} if args.dry_run else reached


def measure_ranks(
    table: Rows, module: str, prefix: str, backend: str, ranks: int, args: argparse.Namespace
) -> None:
    settings = {"backend": backend, "stress": args.stress, "seconds": table.parts.left(), "rounds": table.rounds}
    settings |= {"device": table.device.type, "ddp": args.dry_run or backend == NCCL}
    for name, row in run_ranks(module, settings, ranks, launcher="torchrun").items():
        if row is None:
            table.parts.not_run.append(f"{prefix}: {name}")
        elif "error" in row:
            table.parts.fail(f"{prefix}: {name}", row["error"])
        else:
            table.add(f"{prefix}: {name}", row)


def write_table(page: Path, title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Put the table between the markers of a page. Raises ValueError if it has none."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} has no {BEGIN} before {END}")
    lines = [f"| step | {' | '.join(FORMS)} |", f"|---|{'---:|' * len(FORMS)}"]
    for name, row in rows.items():
        cells = (f"{row[key]:{form}}".strip() if key in row else "" for key, form in FORMS.items())
        lines.append(f"| {name.replace('|', '')} | {' | '.join(cells)} |")
    page.write_text("\n".join([f"{before}{begin}", f"{title}:", "", *lines, f"{end}{after}"]))


def print_launches(device: torch.device) -> dict[str, Any]:
    columns = [("encode", "encode", "9d"), ("encode_torch", "PyTorch", "9d")]
    for ranks in COUNTED_RANKS:
        columns += [(f"{ranks}", f"mean of {ranks}", "12d"), (f"{ranks}_torch", "PyTorch", "9d")]
    table = Table("", 24, columns)
    for name, make in COUNTED.items():
        both = {ranks: launches_of(make, ranks, device) for ranks in COUNTED_RANKS}
        counted = {
            "encode": both[COUNTED_RANKS[0]][0],
            **{f"{ranks}": decoding for ranks, (_, decoding) in both.items()},
        }
        row = {what: own.kernels for what, own in counted.items()}
        table.add(name, row | {f"{what}_torch": own.operations for what, own in counted.items()})
    return table.rows


def print_bytes() -> dict[str, Any]:
    columns = [("parameters", "parameters", "13,d"), ("bytes", "bytes each", "12.2f")]
    table = Table("DGC, 0.1 %", 24, [*columns, ("ratio", "/ minimum", "11.3f")])
    tensors = step_overhead.resnet50()
    numel = sum(t.numel() for t in tensors.values())
    moved = bytes_of_dgc(step_overhead.plan_buckets(tensors), FORMATS["fp16 values, int32 indices"])
    each = {kernel: round(n / numel, 3) for kernel, n in moved.most_common()}
    total = sum(moved.values()) / numel
    table.add("ResNet-50", {"bytes": total, "ratio": total / DGC_BYTES, "parameters": numel, "kernels": each})
    print("    " + ", ".join(f"{kernel} {n}" for kernel, n in each.items()))
    return table.rows


def print_host_costs() -> dict[str, Any]:
    table = Table("host, 4 buckets", 40, [("ms", "ms", "9.2f"), ("calls", "calls", "9d")], host_costs())
    return table.rows


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """What each rank does. A row is None if it was not run."""
    kernels.use("triton")
    device, end = torch.device(settings["device"]), time.monotonic() + settings["seconds"]
    on_gpu, backend, rounds = device.type == "cuda", settings["backend"], settings["rounds"]
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    # a rank that waits for another one gives up after a minute; Triton's interpreter takes longer
    transport: Any = TorchTransport(timeout=60.0 if on_gpu else None, backend=backend)
    transport = StagedTransport(transport) if on_gpu and backend != NCCL else transport
    rows: dict[str, Any] = {}

    def is_over() -> bool:
        return bool(comm.broadcast_object(transport, time.monotonic() > end))

    def add(name: str, measured: Callable[[], Sequence[float]]) -> None:
        rows[name] = None
        if not is_over():
            try:
                with peak_memory(device) as peak:
                    found = torch.tensor(measured(), dtype=torch.float64)
                    row = comm.all_reduce(transport, found, "max").tolist()
                rows[name] = {**dict(zip(Times._fields, row, strict=False)), **peak}
            except Exception:
                rows[name] = {"error": traceback.format_exc(limit=-3)}

    if settings["ddp"]:
        for name, make in _gpt2.steps(device, _gpt2.GPT2 if on_gpu else _gpt2.SMALL, transport).items():
            add(name, lambda make=make: times_of(make(), device, max(rounds // 2, 2), 8 if on_gpu else 1))  # type: ignore[misc]
        for name, make in whole_steps(device, 4096 if on_gpu else 16, transport).items():
            add(name, lambda make=make: times_of(make(), device, rounds))  # type: ignore[misc]
    if transport.size > 1:
        steps, scale = settings["stress"], 10 if on_gpu else 1
        add(f"DGC, {steps} steps with checks", lambda: (stress(transport, device, steps, scale, is_over),))
    return rows
