"""CUDA graphs of DGC's encoding, without a GPU: what is captured is the same in every step, and can be replayed.

In the place of torch.cuda.CUDAGraph, `Recording` notes launches in Triton's interpreter and operations of PyTorch
with their tensors, without doing them, and does them when it is replayed.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from kernels.interpreter import interpreter as interpreter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks._gpu_steps import FREE, Whole, same_bits
from dgc import kernels
from dgc.comm.requests import next_requests
from dgc.compression import DGCCompressor, SparseCompressor
from dgc.core.bucket import Bucket
from dgc.kernels.launch import Launcher
from dgc.memory import ClipByNorm, DGCSGDMemory, NoMemory, ResidualMemory
from dgc.sparse import compressor as sparse
from dgc.sparse.cuda_graphs import WARM_UP, StepGraph, graph_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a GPU")
SHAPES = [(20, 30), (15, 20)]
NUMEL = 900
CPU = torch.device("cpu")


def place(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


class Recording(TorchDispatchMode):
    """A stand-in for a CUDA graph. Unless it `runs`, nothing is done in its context but to allocate results."""

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
        in_place = func._schema.is_mutable
        result = args[0] if in_place and not self.runs else func(*args, **kwargs)
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

    def signature(self) -> list[Any]:
        """Each call with its constants and addresses. What the work has allocated counts by its number."""
        numbers = {place(t): i for i, t in enumerate(self.made)}

        def told(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return str(x)
            return numbers.get(place(x), f"at {place(x)}"), x.storage_offset(), tuple(x.shape), x.dtype

        return [(name, tree_map(told, arguments)) for name, _, arguments, _ in self.calls]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """The graphs that are captured."""
    graphs: list[Recording] = []

    @contextmanager
    def capture(graph: Recording, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local" and stream == f"the stream on {CPU}"
        graphs.append(graph)
        with graph:
            yield

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream on {device}")
    return graphs


class Rank(Whole):
    """The only rank, with one bucket, and the graph if it is given. Otherwise it uses plain PyTorch."""

    def __init__(self, compressor: Any, graph: StepGraph | None):
        self.backend, self.compressor, self.graph = "triton" if graph else "reference", compressor, graph
        with patch.object(sparse, "graph_of", lambda bucket: graph):
            super().__init__(compressor, [SHAPES], CPU)
        (self.bucket,), self.gradient = self.buckets, torch.empty(NUMEL)

    def run(self, number: int, watch: Any = None, moves: bool = False) -> list[Tensor]:
        """A step with the gradient of this number, NaN if below 0. Returns its mean and the state after it."""
        self.gradient = torch.empty(NUMEL) if moves else self.gradient
        self.gradient.copy_(torch.randn(NUMEL, generator=torch.Generator().manual_seed(abs(number))))
        if number < 0:
            self.gradient[7] = torch.nan
        for i, part in enumerate(self.gradient.split([segment.numel for segment in self.bucket.segments])):
            self.bucket.use_gradient(i, part)
        conversation = self.states.reduce(self.bucket)
        with patch.object(kernels, "_asked", self.backend):
            request: Any
            with watch or nullcontext():
                (request,) = next_requests(conversation)
            with pytest.raises(StopIteration) as ended:
                next_requests(conversation, ((request.tensor.clone(),),))
        result = ended.value.value
        result.write_to(self.bucket)
        assert (result.nonfinite is not None) == (number < 0)
        if number < 0:
            self.states.rollback(self.bucket)
        state = self.states[self.bucket].settled()
        return [self.bucket.flat.clone(), *state.local.values(), *state.errors.values()]


CLIPPING = DGCSGDMemory(0.9, True, ClipByNorm(1.0))
METHODS = {
    "DGC": lambda: DGCCompressor(0.02, DGCSGDMemory(0.9), values="fp16", indices="int32"),
    "clipping": lambda: DGCCompressor(0.02, CLIPPING, values="int8", indices="rice"),
    "top-k": lambda: SparseCompressor(0.02, ResidualMemory(), "predicted", values="bf16"),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_step_launches_the_same(captured: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The same kernels and operations, with the same grids, constants and addresses, from the third step on."""
    monkeypatch.setattr("dgc.sparse.cuda_graphs.WARM_UP", 99)
    rank, steps = Rank(METHODS[name](), StepGraph("bucket", CPU)), []
    for number in range(1, 6):
        watch = Recording(runs=True)
        rank.run(number, watch)
        steps.append(watch.signature())
    assert steps[2] == steps[3] == steps[4] and steps[1] != steps[2] and captured == []


@pytest.mark.parametrize("name", METHODS)
def test_replays_have_the_same_bits(captured: Any, name: str) -> None:
    """Those of plain PyTorch. A step after a dropped one runs without the graph."""
    graph = StepGraph("bucket", CPU)
    graphed, eager = Rank(METHODS[name](), graph), Rank(METHODS[name](), None)
    for number in (1, 2, 3, 4, 5, -6, 7, 8, -9, -10, 11, 12):
        for ours, theirs in zip(graphed.run(number), eager.run(number), strict=True):
            assert number < 0 or same_bits(ours, theirs), number
    # steps 2 to 4 are the warm-up
    assert [own.replays for own in captured] == [5] and graph.captures == 1


@pytest.fixture
def both_ranks() -> tuple[Rank, Rank]:
    """A rank with a graph, and one without."""
    ratios: dict[str, Any] = {"warmup_epochs": 2, "warmup_coeff": [0.05, 0.02]}
    graph = StepGraph("bucket", CPU)
    first, second = (Rank(DGCCompressor(0.02, DGCSGDMemory(0.9), **ratios), of) for of in (graph, None))
    for rank in (first, second):
        rank.states.begin_epoch(0)
    return first, second


def check_steps(ranks: tuple[Rank, Rank], numbers: range, moves: bool = False) -> None:
    """The steps of these numbers have the same bits with a graph and without."""
    for number in numbers:
        assert all(map(same_bits, *(rank.run(number, moves=moves) for rank in ranks))), number


def change_momentum(rank: Rank) -> None:
    rank.states.compressor = rank.states.compressor.changed(memory=DGCSGDMemory(0.8))


CHANGES: dict[str, Any] = {
    "another momentum": change_momentum,
    "another ratio": lambda rank: rank.states.begin_epoch(1),
    "a loaded state, which is elsewhere": lambda rank: rank.states.load_state_dict(rank.states.state_dict()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_makes_another_graph(captured: Any, both_ranks: tuple[Rank, Rank], change: Any) -> None:
    check_steps(both_ranks, range(1, 7))
    assert [own.replays for own in captured] == [2]
    for rank in both_ranks:
        change(rank)
    check_steps(both_ranks, range(7, 13))
    first, second = captured
    assert first.replays == 2 and second.replays >= 2


def test_gradients_at_other_addresses_in_each_step_are_copied(
    captured: Any, both_ranks: tuple[Rank, Rank]
) -> None:
    check_steps(both_ranks, range(1, 7))
    with pytest.warns(UserWarning, match=r"zero_grad\(set_to_none=False\) avoids the copy"):
        check_steps(both_ranks, range(23, 24 + WARM_UP), moves=True)
    check_steps(both_ranks, range(30, 36), moves=True)
    first, second = captured
    assert first.replays == 2 and second.replays >= 3


def warmed_up(steps: int) -> Rank:
    rank = Rank(METHODS["DGC"](), StepGraph("bucket", CPU))
    for number in range(1, WARM_UP + steps):
        rank.run(number)
    return rank


@pytest.mark.parametrize(("switch", "wanted"), [("1", True), ("0", False)])
def test_buckets_of_a_gpu_alone_have_a_graph(monkeypatch: pytest.MonkeyPatch, switch: str, wanted: bool) -> None:
    gpu, cpu = (Bucket("bucket", (), torch.float32, torch.device(device)) for device in ("cuda", "cpu"))
    monkeypatch.setenv("DGC_CUDA_GRAPHS", switch)
    assert (graph_of(gpu) is not None) == wanted and graph_of(cpu) is None


def test_another_value_of_the_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGC_CUDA_GRAPHS", "yes")
    with pytest.raises(ValueError, match="DGC_CUDA_GRAPHS must be 0 or 1, not 'yes'"):
        graph_of(Bucket("bucket", (), torch.float32, torch.device("cuda")))


@pytest.mark.parametrize(
    "make", [lambda: DGCCompressor(0.02, DGCSGDMemory(0.9), 0.5), lambda: SparseCompressor(0.02, NoMemory())]
)
def test_a_method_whose_steps_differ_has_no_graph(captured: Any, make: Any) -> None:
    rank = Rank(make(), StepGraph("bucket", CPU))
    assert rank.states[rank.bucket].graph is None


def test_tables_live_as_long_as_the_graph(captured: Any) -> None:
    """Other buckets may push them out of the cache."""
    rank = warmed_up(3)
    sources = [call[2][5] for call in captured[0].calls if call[0] == "accumulate"]
    assert rank.graph is not None and any(table is sources[0] for table in rank.graph._tables)


def test_an_encoding_that_cannot_be_captured_is_an_error_with_a_cure(
    captured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = warmed_up(2)
    error = RuntimeError("operation not permitted when stream is capturing")
    monkeypatch.setattr(torch.cuda, "graph", Mock(side_effect=error))
    expected = r"the encoding of bucket bucket cannot be a CUDA graph: operation not .* Unset DGC_CUDA_GRAPHS"
    with pytest.raises(RuntimeError, match=expected):
        rank.run(9)
