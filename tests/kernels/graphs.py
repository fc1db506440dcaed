"""A stand-in for CUDA graphs, and ranks of one bucket whose steps it records."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks._gpu_steps import FREE, segments_of
from dgc import kernels
from dgc.comm.requests import AllGather, AllToAll, next_requests
from dgc.core import graphs
from dgc.core.bucket import Bucket
from dgc.core.results import explained, joined
from dgc.engine.state import BucketStates
from dgc.kernels.launch import Launcher, Recorder, recording

SHAPES = [(20, 30), (15, 20)]
NUMEL = 900
CPU = torch.device("cpu")


def place(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


class Recording(TorchDispatchMode):
    """In the place of torch.cuda.CUDAGraph: notes launches in Triton's interpreter, and operations of PyTorch,
    with their tensors, and does them when it is replayed. Unless it `runs`, nothing is done but to allocate.
    """

    def __init__(self, runs: bool = False) -> None:
        super().__init__()
        self.runs, self.replays = runs, 0
        self.calls: list[tuple[str, Any, tuple[Any, ...], Any]] = []  # name, function, arguments, result
        self.made: list[Tensor] = []  # what was allocated

    def __enter__(self) -> "Recording":
        launch = Launcher.__call__

        def recorded(launcher: Any, kernel: Any, *arguments: Any) -> None:
            def again(*arguments: Any) -> None:
                with _disable_current_modes():
                    launch(launcher, kernel, *arguments)

            self.calls.append((kernel.fn.__name__, again, arguments, None))
            if self.runs:
                again(*arguments)

        self._patch = patch.object(Launcher, "__call__", recorded)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in ("_local_scalar_dense", "nonzero") and not self.runs:
            raise RuntimeError("operation not permitted when stream is capturing")
        in_place = func._schema.is_mutable
        result = kwargs.get("out", args[0]) if in_place and not self.runs else func(*args, **kwargs)
        given = {place(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        self.made += [t for t in tree_leaves(result) if isinstance(t, Tensor) and place(t) not in given]
        if name not in FREE:
            self.calls.append((name, lambda *a: func(*a, **kwargs), args, None if in_place else result))
        return result

    def replay(self) -> None:
        self.replays += 1
        for _, function, arguments, result in self.calls:
            again = function(*arguments)
            for to, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(to, Tensor):
                    to.copy_(new)


def signature(recordings: list[Recording], state: list[Tensor]) -> list[Any]:
    """Each call of a step with its constants and addresses. The tensors of the state with which it begins, which a
    graph keeps where they are, and what the step has allocated, count by their numbers.
    """
    made = [t for recording in recordings for t in recording.made]
    numbers = {place(t): f"made {i}" for i, t in enumerate(made)}
    names = {t.data_ptr(): f"state {i}" for i, t in enumerate(state)}

    def told(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return str(x)
        where = names.get(x.data_ptr()) or numbers.get(place(x)) or f"at {x.data_ptr()}"
        return where, tuple(x.shape), tuple(x.stride()), x.dtype

    calls = [call for recording in recordings for call in recording.calls]
    return [(name, tree_map(told, arguments)) for name, _, arguments, _ in calls]


@contextmanager
def stand_in(found: list[Recording]) -> Iterator[None]:
    """Let graphs be recordings, which are collected."""

    @contextmanager
    def capture(graph: Recording, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local" and stream == f"the stream on {CPU}" and pool == "pool"
        found.append(graph)
        with graph:
            yield

    with (
        patch.object(torch.cuda, "CUDAGraph", Recording),
        patch.object(torch.cuda, "graph", capture),
        patch.object(torch.cuda, "graph_pool_handle", lambda: "pool"),
        patch.object(torch.cuda, "current_stream", lambda device: f"the stream on {device}"),
    ):
        yield


class Rank:
    """One of two ranks that have equal gradients, with one bucket, and graphs or none, on Triton's kernels.

    Its tensors count as tensors of a device. The gathered replies are where they were in the last step, unless
    `replies_move`.
    """

    def __init__(self, compressor: Any, has_graphs: bool, dtype: torch.dtype = torch.float32):
        self.bucket = Bucket("bucket", segments_of(SHAPES), dtype, CPU)
        self.graphs = graphs.StepGraphs(self.bucket) if has_graphs else None
        self.states = BucketStates(compressor)
        with patch("dgc.engine.state.graphs_of", lambda bucket: self.graphs):
            self.states.add(self.bucket, 2, 0)
        self.gradient = torch.empty(NUMEL, dtype=dtype)
        self.replies_move = False
        self.watched: list[Recording] = []  # of each part of the last step
        self.before: list[Tensor] = []  # of the state before it
        self._recorders: dict[int, Recorder] = {}
        self._replies: dict[Any, Tensor] = {}

    def run(self, number: int, watches: bool = False, moves: bool = False) -> list[Tensor]:
        """A step with the gradient of this number, NaN if below 0. Returns its mean and the state after it.

        watches: Record what is launched, with seeds on the device. moves: The gradient is elsewhere.
        """
        self.gradient = torch.empty_like(self.gradient) if moves else self.gradient
        self.gradient.copy_(torch.randn(NUMEL, generator=torch.Generator().manual_seed(abs(number))))
        if number < 0:
            self.gradient[7] = torch.nan
        for i, part in enumerate(self.gradient.split([segment.numel for segment in self.bucket.segments])):
            self.bucket.use_gradient(i, part)
        self.watched, self.before = [], self.states[self.bucket].moving()
        with patch.object(kernels, "_asked", "triton"), patch("dgc.comm.requests.HOST", "none"):
            result = self._end(self.states.reduce(self.bucket), watches)
            result.write_to(self.bucket)
            reports = result.reports
            said = explained(reports, joined(reports, []).tolist()) if reports else result.nonfinite
        assert (said is not None) == (number < 0), said
        if number < 0:
            self.states.rollback(self.bucket)
        return [self.bucket.flat.clone(), *self.states.errors()]

    def _end(self, conversation: Any, watches: bool) -> Any:
        replies = None
        if watches:
            repeats = self.states.compressor.repeats(self.bucket, self.states[self.bucket])
            seeds = () if repeats is None else repeats.seeds
            recorder = self._recorders.setdefault(len(seeds), Recorder(len(seeds), CPU))
            recorder.fill(seeds)
        try:
            for number in range(10):
                watch = Recording(runs=True) if watches else nullcontext()
                if isinstance(watch, Recording):
                    self.watched.append(watch)
                with recording(recorder) if watches else nullcontext(), watch:
                    requests = next_requests(conversation, replies)
                replies = tuple(self._reply(10 * number + i, request) for i, request in enumerate(requests))
        except StopIteration as stop:
            return stop.value

    def _reply(self, number: int, request: Any) -> Any:
        if isinstance(request, AllToAll):
            request = AllGather(request.tensor[: request.splits[0]], into=request.into)
        if not isinstance(request, AllGather):
            return request.tensor
        rows = torch.stack([request.tensor] * 2)
        kept = self._replies.setdefault((number, rows.shape), rows) if self.watched else request.into
        if kept is not None and not self.replies_move:
            rows = kept.view(rows.shape).copy_(rows)
        return rows.view(-1).view(2, -1).unbind()
