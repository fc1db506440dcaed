"""CUDA graphs of whole steps, without a GPU: what is recorded is the same in every step, and can be replayed.

`kernels.graphs.Recording` takes the place of torch.cuda.CUDAGraph.
"""

import copy
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from engines import engine_of, step
from kernels.graphs import CPU, Rank, Recording, signature, stand_in
from kernels.interpreter import interpreter as interpreter
from torch import Tensor

from benchmarks._gpu_steps import same_bits
from dgc import kernels
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.staging import HostCopy
from dgc.compression import (
    BlockwiseCompressor,
    ChunkCompressor,
    DGCCompressor,
    PowerSGDCompressor,
    QSGDCompressor,
    ScaledSignCompressor,
    SignSGDCompressor,
    SparseCompressor,
    ThresholdCompressor,
    TwoPhaseCompressor,
)
from dgc.core import graphs as graphs_module
from dgc.core.bucket import Bucket
from dgc.core.graphs import WARM_UP, StepGraphs, graphs_of
from dgc.core.protocol import Repeats
from dgc.kernels.launch import Recorder, on_device, recording
from dgc.memory import ClipByNorm, DGCSGDMemory, NoMemory, ResidualMemory

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a GPU")


@pytest.fixture
def recorded() -> Any:
    """The graphs that are recorded."""
    found: list[Recording] = []
    with stand_in(found):
        yield found


CLIPPING = DGCSGDMemory(0.9, True, ClipByNorm(1.0))
METHODS: dict[str, Any] = {
    "DGC": lambda: DGCCompressor(0.02, DGCSGDMemory(0.9), values="fp16", indices="int32"),
    "DGC, clipping, coded": lambda: DGCCompressor(0.02, CLIPPING, values="int8", indices="rice"),
    "top-k": lambda: SparseCompressor(0.02, ResidualMemory(), "predicted", values="bf16"),
    "signs": ScaledSignCompressor,
    "signSGD": lambda: SignSGDCompressor(0.9),
    "2 bits": lambda: ThresholdCompressor(2, None, 0.7, wire="gather"),
    "QSGD": lambda: QSGDCompressor(error_feedback=True),
    "int8 blocks": BlockwiseCompressor,
    "two phases, 8 bits": TwoPhaseCompressor,
    "two phases, 4 bits": lambda: TwoPhaseCompressor(4, hadamard=True),
    "two phases, 16 bits": lambda: TwoPhaseCompressor(16),
    "PowerSGD": lambda: PowerSGDCompressor(2, 0),
    "PowerSGD, two half steps": lambda: PowerSGDCompressor(2, 0, 2, wire="fp16"),
    "PowerSGD, paper": lambda: PowerSGDCompressor(2, 0, mode="paper"),
}
FAMILIES = ["DGC", "QSGD", "two phases, 8 bits", "PowerSGD"]


@pytest.mark.parametrize("name", METHODS)
def test_every_second_step_launches_the_same(name: str) -> None:
    """The same kernels and operations, with the same grids, constants and addresses, from the fourth step on."""
    rank, steps = Rank(METHODS[name](), has_graphs=False), []
    rank.bucket.keeps_scratch = True
    for number in range(7):
        rank.run(number, watches=number > 2)
        steps.append(signature(rank.watched, rank.before))
    assert steps[3] == steps[5] and steps[4] == steps[6] and len(steps[3]) > 2


class WithoutGraphs:
    """The steps of a rank without graphs, which the tests of one method share: each is run once."""

    def __init__(self, name: str, numbers: tuple[int, ...]) -> None:
        self._rank, self._numbers = Rank(METHODS[name](), False), numbers
        self._found: list[tuple[list[Tensor], Any]] = []  # by step: its result, and the state after it
        self._next = 0

    def begin(self) -> "WithoutGraphs":
        self._next = 0
        return self

    def run(self, number: int) -> list[Tensor]:
        assert number == self._numbers[self._next]
        self._next += 1
        if self._next > len(self._found):
            result = [tensor.clone() for tensor in self._rank.run(number)]
            self._found.append((result, copy.deepcopy(self._rank.states.state_dict())))
        return self._found[self._next - 1][0]

    def state_dict(self) -> Any:
        return self._found[self._next - 1][1]


DROPPING, PLAIN = (1, 2, 3, 4, 5, 6, -7, -8, 9, 10, 11, 12), tuple(range(1, 14))
_kept = cache(WithoutGraphs)


def without_graphs(name: str, numbers: tuple[int, ...] = PLAIN) -> WithoutGraphs:
    return _kept(name, numbers).begin()


def check_steps(name: str, numbers: Any, ours: Rank, theirs: Rank | WithoutGraphs, **how: Any) -> None:
    """The steps of these numbers have the same bits with graphs and without."""
    for number in numbers:
        found, expected = ours.run(number, **how), theirs.run(number)
        assert number < 0 or all(map(same_bits, found, expected)), (name, number)


@pytest.mark.parametrize(
    ("name", "replies_move"), [*((name, False) for name in METHODS), *((name, True) for name in FAMILIES)]
)
def test_replays_have_the_bits_of_steps_without_graphs(recorded: Any, name: str, replies_move: bool) -> None:
    """Also after steps that were dropped, which may run without a graph."""
    ours, theirs = Rank(METHODS[name](), True), without_graphs(name, DROPPING)
    ours.replies_move = replies_move
    check_steps(name, DROPPING, ours, theirs)
    assert ours.graphs is not None and ours.graphs.captures == 1
    assert all(graph.replays >= 2 for graph in recorded)
    assert_alike(ours.states.state_dict(), theirs.state_dict())


def assert_alike(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert same_bits(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_alike(found[key], expected[key])
    else:
        assert found == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_half_precision_have_graphs(recorded: Any, name: str) -> None:
    ours, theirs = (Rank(METHODS[name](), has_graphs, torch.bfloat16) for has_graphs in (True, False))
    check_steps(name, range(1, 7), ours, theirs)
    assert ours.graphs is not None and ours.graphs.captures == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_an_engine_reads_once_per_step_of_graphs(
    recorded: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With several buckets. The means are those without graphs."""
    monkeypatch.setattr("dgc.comm.requests.HOST", "none")
    monkeypatch.setattr(kernels, "_asked", "triton")
    read = Mock(side_effect=HostCopy)
    monkeypatch.setattr("dgc.engine.loop.HostCopy", read)
    theirs = engine_of(LockstepWorld(1).transports[0], METHODS[name]())
    monkeypatch.setattr("dgc.engine.state.graphs_of", StepGraphs)
    ours = engine_of(LockstepWorld(1).transports[0], METHODS[name]())
    for seed in range(7):
        for engine in (ours, theirs):
            assert step(engine, seed) is None
        for (own,), (other,) in zip(ours.groups, theirs.groups, strict=True):
            assert same_bits(own.bucket.flat, other.bucket.flat)
    assert read.call_count == 2 * 7 and recorded and all(graph.replays > 0 for graph in recorded)


@pytest.mark.parametrize("name", FAMILIES)
def test_replies_are_received_where_the_graph_reads_them(recorded: Any, name: str) -> None:
    rank = Rank(METHODS[name](), has_graphs=True)
    for number in range(1, 6):
        rank.run(number)
    (step, _) = rank.graphs._cycle  # type: ignore[union-attr]
    gathered = [r for part in step.parts for r in part.requests or () if hasattr(r, "into")]
    assert gathered and all(request.into is not None for request in gathered if name != "PowerSGD")


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_at_other_addresses_make_other_graphs(recorded: Any, name: str) -> None:
    ours, theirs = Rank(METHODS[name](), True), without_graphs(name)
    check_steps(name, range(1, 8), ours, theirs)
    before = [graph.replays for graph in recorded]
    ours.gradient = torch.empty_like(ours.gradient)
    check_steps(name, range(8, 14), ours, theirs)
    assert [graph.replays for graph in recorded[: len(before)]] == before
    assert ours.graphs is not None and ours.graphs.captures == 2
    assert all(graph.replays > 0 for graph in recorded)


def test_gradients_at_other_addresses_in_each_step_are_copied(recorded: Any) -> None:
    ours, theirs = (Rank(METHODS["DGC"](), has_graphs) for has_graphs in (True, False))
    kept = []  # so that no address is used again

    def moves(numbers: range) -> None:
        for number in numbers:
            check_steps("DGC", [number], ours, theirs, moves=True)
            kept.append(ours.gradient)

    with pytest.warns(UserWarning, match=r"zero_grad\(set_to_none=False\) avoids the copy"):
        moves(range(1, 4 + WARM_UP))
    moves(range(30, 37))
    assert ours.graphs is not None and ours.graphs.captures == 1
    assert all(graph.replays > 0 for graph in recorded)


def other_momentum(rank: Rank) -> None:
    rank.states.compressor = rank.states.compressor.changed(memory=DGCSGDMemory(0.8))


CHANGES: dict[str, Any] = {
    "another momentum": other_momentum,
    "another ratio": lambda rank: rank.states.begin_epoch(1),
    "a loaded state": lambda rank: rank.states.load_state_dict(rank.states.state_dict()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_a_setting_makes_other_graphs(recorded: Any, change: Any) -> None:
    ratios: dict[str, Any] = {"warmup_epochs": 2, "warmup_coeff": [0.05, 0.02]}
    make = lambda: DGCCompressor(0.02, DGCSGDMemory(0.9), **ratios)  # noqa: E731
    ours, theirs = (Rank(make(), has_graphs) for has_graphs in (True, False))
    for rank in (ours, theirs):
        rank.states.begin_epoch(0)
    check_steps("DGC", range(1, 8), ours, theirs)
    before = [graph.replays for graph in recorded]
    assert sum(before) == 6
    for rank in (ours, theirs):
        change(rank)
    check_steps("DGC", range(8, 16), ours, theirs)
    assert [graph.replays for graph in recorded[: len(before)]] == before
    assert ours.graphs is not None and ours.graphs.captures == 2


@pytest.mark.parametrize("name", ["QSGD", "two phases, 8 bits", "PowerSGD"])
def test_a_state_from_elsewhere_is_copied_to_where_graphs_have_it(recorded: Any, name: str) -> None:
    ours, theirs = (Rank(METHODS[name](), has_graphs) for has_graphs in (True, False))
    check_steps(name, range(1, 8), ours, theirs)
    for rank in (ours, theirs):
        state = rank.states[rank.bucket]
        rank.states[rank.bucket] = state.loaded(rank.bucket, state.saved(rank.bucket))
    check_steps(name, range(8, 12), ours, theirs)
    assert_alike(ours.states.state_dict(), theirs.states.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        lambda: DGCCompressor(0.02, DGCSGDMemory(0.9), 0.5),
        lambda: SparseCompressor(0.02, NoMemory()),
        lambda: SparseCompressor(0.02, ResidualMemory(), exchange="reduce_scatter"),
        lambda: ChunkCompressor(0.1, DGCSGDMemory(0.9), 32),
        lambda: PowerSGDCompressor(2, 0, warm_start=False),
        lambda: ThresholdCompressor(wire="scatter"),
        lambda: TwoPhaseCompressor(16, random=True),
    ],
)
def test_a_method_whose_steps_differ_has_no_graph(recorded: Any, make: Any) -> None:
    ours, theirs = (Rank(make(), has_graphs) for has_graphs in (True, False))
    check_steps("", range(1, 7), ours, theirs)
    assert recorded == []


def test_replies_that_would_take_much_memory_are_not_kept(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "MOST_REPLIES", 0.1)
    monkeypatch.setattr(graphs_module, "FEW", 0)
    ours, theirs = (Rank(METHODS["QSGD"](), has_graphs) for has_graphs in (True, False))
    check_steps("QSGD", range(1, 7), ours, theirs)
    assert recorded == []


@pytest.mark.parametrize("switch", ["1", None])
def test_buckets_of_a_gpu_have_graphs_unless_they_are_switched_off(
    monkeypatch: pytest.MonkeyPatch, switch: str | None
) -> None:
    gpu, cpu = (Bucket("bucket", (), torch.float32, torch.device(device)) for device in ("cuda", "cpu"))
    monkeypatch.delenv("DGC_CUDA_GRAPHS", raising=False)
    if switch is not None:
        monkeypatch.setenv("DGC_CUDA_GRAPHS", switch)
    assert graphs_of(gpu) is not None and graphs_of(cpu) is None
    monkeypatch.setenv("DGC_CUDA_GRAPHS", "0")
    assert graphs_of(gpu) is None


def test_another_value_of_the_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGC_CUDA_GRAPHS", "yes")
    with pytest.raises(ValueError, match="DGC_CUDA_GRAPHS must be 0 or 1, not 'yes'"):
        graphs_of(Bucket("bucket", (), torch.float32, torch.device("cuda")))


def test_tables_live_as_long_as_the_graphs(recorded: Any) -> None:
    """Other buckets may push them out of the cache."""
    rank = Rank(METHODS["DGC"](), has_graphs=True)
    for number in range(1, 8):
        rank.run(number)
    sources = [call[2][5] for call in recorded[0].calls if call[0] == "accumulate"]
    kept = rank.graphs._recorder._kept.values()  # type: ignore[union-attr]
    assert any(table is sources[0] for table in kept)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_step_that_cannot_be_recorded_runs_as_it_is_with_one_warning(
    recorded: Any, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Whichever of its graphs fails: nothing of a step is done while it is recorded."""
    ours, theirs = Rank(METHODS["DGC"](), True), without_graphs("DGC")
    check_steps("DGC", range(1, 5), ours, theirs)
    begin, error = torch.cuda.graph, RuntimeError("operation not permitted when stream is capturing")
    after = Mock(side_effect=[*[False] * at, *[True] * 99])

    def failing(*arguments: Any, **options: Any) -> Any:
        if after():
            raise error
        return begin(*arguments, **options)

    monkeypatch.setattr(torch.cuda, "graph", failing)
    expected = r"the step of bucket bucket cannot be a CUDA graph \(operation not .*DGC_CUDA_GRAPHS=0 avoids"
    with pytest.warns(UserWarning, match=expected):
        check_steps("DGC", [5], ours, theirs)
    check_steps("DGC", range(6, 12), ours, theirs)
    assert_alike(ours.states.state_dict(), theirs.state_dict())


class OtherSeeds(QSGDCompressor):
    def repeats(self, bucket: Bucket, state: Any) -> Repeats:
        return Repeats((), (7,))


class NoSeeds(QSGDCompressor):
    def repeats(self, bucket: Bucket, state: Any) -> Repeats:
        return Repeats()


@pytest.mark.parametrize("method", [OtherSeeds, NoSeeds])
def test_a_step_with_other_seeds_than_it_says_is_not_recorded(recorded: Any, method: Any) -> None:
    ours, theirs = Rank(method(), True), Rank(QSGDCompressor(), False)
    with pytest.warns(UserWarning, match="other random numbers than it says"):
        check_steps("QSGD", range(1, 8), ours, theirs)


class Other(DGCCompressor):
    def reduce(self, bucket: Bucket, state: Any) -> Any:
        return (yield from super().reduce(bucket, state))


def test_a_subclass_with_another_step_has_no_graph_unless_it_says_so(recorded: Any) -> None:
    ours, theirs = (Rank(Other(0.02, DGCSGDMemory(0.9)), has_graphs) for has_graphs in (True, False))
    check_steps("DGC", range(1, 7), ours, theirs)
    assert recorded == []


def test_a_table_is_not_made_while_launches_are_recorded() -> None:
    values = (3.0, 1.0, 4.0, 1.5, 9.0)
    with (
        recording(recorder := Recorder(0, CPU), captures=True),
        pytest.raises(RuntimeError, match="needs a table"),
    ):
        on_device(values, torch.float64, CPU)
    with recording(recorder, captures=True):
        assert on_device(values, torch.float64, CPU).tolist() == list(values)


def test_a_recorder_gives_seeds_in_their_order() -> None:
    recorder = Recorder(2, CPU)
    recorder.fill([5, -6])
    assert [slot[0].item() for slot in (recorder.slot(5), recorder.slot(-6)) if slot is not None] == [5, -6]
    assert recorder.slot(5) is None
