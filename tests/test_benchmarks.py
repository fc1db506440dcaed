"""What benchmarks compute beside times, the bytes of large models, when they measure; the benchmark of quality."""

import json
import math
import re
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import benchmarks
import dgc.kernels as kernels
from benchmarks import _harness as harness
from benchmarks import decoding, outer_speed, scale, selectors
from benchmarks.__main__ import main as print_list
from benchmarks._recordings import MOMENTUM, Gradients, Learner, Recording
from benchmarks._runs import TASKS, WITH_ADAM, Task, simulate, summary_of, to_train
from benchmarks.convergence import draw, main, report, rows_of
from benchmarks.methods import Method, measure, parameters_of
from benchmarks.selectors import Counts, SelectorStep, count_step, counting, fit_tensors
from benchmarks.train_step import Work
from dgc.comm import Transport
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import SparseCompressor
from dgc.core.bucket import lay_out
from dgc.kernels.library import choose_isa, supported_isas
from dgc.sparse.selectors import Laplace, quota_of
from dgc_training.config import load
from dgc_training.startup.arguments import parse_arguments
from dgc_training.startup.build import build as build_model
from scripts.methods import LOCAL_STEPS, METHODS, SELECTORS, build

SEGMENTS = lay_out([("a", torch.empty(100, 200, device="meta")), ("b", torch.empty(30, 100, device="meta"))])
N = 23_000
Printed = pytest.CaptureFixture[str]
fit: Any = selectors.fit  # None of zeros alone
PYSOURCE = ("--task", "pysource", "--model", "tiny")
ADAMS, LANGUAGE = ("onebit-adam", "zero-one-adam"), ("dense", "powersgd-4", "2bit-adaptive")
METHODS_OF = {
    "digits": ("dense", "dgc", *ADAMS, "dgc-adam"),
    "numwords": (*LANGUAGE, "dgc-clipped", "sgp", "osgp"),
    "numwords-by-epoch": ("ar", "adpsgd"),
    "pysource": (*LANGUAGE, "dgc-residual", *ADAMS, "dgc-adam", "dgc-adam-0.1-percent"),
    "pysource-tiny": WITH_ADAM,
    "pysource-124m": WITH_ADAM,
    "pysource-long": (*LOCAL_STEPS, "zero-one-h10", "zero-one-h6"),
    "lstm": (*LANGUAGE, *ADAMS),
    "lstm-sgd": ("dense", "dgc", "powersgd-1"),
}


def laplace(n: int, seed: int = 0) -> Tensor:
    u = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5
    return (-3 * u.sign() * torch.log1p(-2 * u.abs())).float()


def normal(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0))


def files_with(words: str) -> list[str]:
    files = Path(benchmarks.__file__).parent.glob("*.py")
    return sorted(file.stem for file in files if words in file.read_text())


STARTS = {"a": 1.0, "b": 3.0, "slow": 5.0}


def taken_in_turns(order: list[tuple[int, str]], rounds: list[int]) -> Any:
    """Three methods in 7 rounds after 2 of warm-up; what each returns grows by 1 a round."""

    def work(name: str, number: int) -> float:
        order.append((number, name))
        return number + STARTS[name]

    works = {name: partial(work, name) for name in STARTS}
    return harness.in_turns(works, 7, 2, slow=["slow"], before=rounds.append)


def test_methods_take_turns_in_each_round() -> None:
    order, rounds = list[tuple[int, str]](), list[int]()
    found = taken_in_turns(order, rounds)
    assert rounds == list(range(-2, 7)) and list(found["a"]) == list(range(7)) and list(found["slow"]) == [0, 6]
    by_round = [[name for number, name in order if number == i] for i in range(7)]
    assert len({tuple(names) for names in by_round}) > 1 and {len(names) for names in by_round} == {2, 3}


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    found = taken_in_turns([], [])
    assert harness.middle(found["b"]) == 6.0
    assert harness.ratio(found["b"], found["a"]) == 1.5  # 3/1, 4/2, 5/3, 6/4, ...: the median of round 3
    assert harness.ratio(found["slow"], found["a"]) == (5 + 11 / 7) / 2


@pytest.mark.parametrize(("n", "expected"), [(5, None), (6, (0, 5)), (9, (1, 7)), (25, (7, 17)), (100, (39, 60))])
def test_an_interval_of_the_median_has_a_confidence_of_95_percent(n: int, expected: Any) -> None:
    """Expected: tables of the sign test."""
    assert harness.interval(list(map(float, range(n)))) == expected


def test_what_benchmarks_print(capsys: Printed) -> None:
    harness.print_json({"a": [math.nan, 1, {"b": -math.inf, "c": "x", "d": None}]})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"a": [None, 1, {"b": None, "c": "x", "d": None}]}
    # _throughput.py needs nothing but Python's own library, and has no NaN
    assert files_with("json.dump") == ["_harness", "_throughput"]
    # a table has aligned columns and keeps its rows
    columns = [("ms", "median ms", "10.2f"), ("n", "sent", "8,d"), ("share", "share", "7.1%")]
    table = harness.Table("method", 8, columns)
    table.add("a", {"ms": 1.234, "n": 12345, "share": 0.5, "other": 1})
    table.add("b", {"n": 1, "share": None})
    a, b = "a             1.23  12,345  50.0%", "b                        1"
    assert capsys.readouterr().out.splitlines() == ["", "method   median ms    sent  share", a, b]
    assert table.rows["a"]["other"] == 1 and list(table.rows) == ["a", "b"]
    # the list has a name, a duration and a line of each
    print_list()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[::2]] == files_with("\nTAKES = ")
    assert all(line.startswith(" " * 17) and line.strip() for line in lines[1::2])


def test_every_method_of_the_table_is_built() -> None:
    """Files and changes fit their constructors, a ratio warm-up is off, and a row's own ratio is kept."""
    found = {name: build(name, 0.25) for name in METHODS}
    sparse = {name: of for name, of in found.items() if isinstance(of, SparseCompressor)}
    own = {name: of.compress_ratio for name, of in sparse.items() if of.compress_ratio != 0.25}
    assert own == {"dgc-1-percent": 0.01, "dgc-residual-0.1-percent": 0.001, "dgc-adam-0.1-percent": 0.001}
    assert len(sparse) > 20 and build("streaming", delay=3).delay == 3 and build("diloco").average_every == 50


def test_the_large_model_has_the_shape_of_gpt2_small(tmp_path: Path) -> None:
    args, overrides = parse_arguments(to_train(given("pysource-124m", device="cuda"), "dense", 0, tmp_path))
    tree = load(args.configs, overrides)
    with torch.device("meta"):
        model = build_model(tree.model)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808 and model.context == 1024
    assert args.devices == "gpu" and tree.deterministic and tree.train.precision == "bf16"
    assert tree.train.scheduler.total_steps == 1000


def test_a_fit_is_the_distance_between_distributions() -> None:
    assert fit(laplace(50_000)).ratio < 0.2 and fit(5 + normal(50_000)).ratio > 5
    # of a standard normal to the Laplace of its mean distance: by midpoints, in fp64, without samples
    p = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000
    other = -math.sqrt(2 / math.pi) * (p - 0.5).sign() * torch.log1p(-2 * (p - 0.5).abs())
    expected = float((torch.special.ndtri(p) - other).abs().mean())
    assert fit(normal(200_000)).laplace == pytest.approx(expected, rel=0.03)


def test_neither_zeros_nor_a_scale_change_a_fit() -> None:
    x = laplace(20_000)
    assert fit(torch.cat([x, torch.zeros(5000)])) == fit(x)
    assert fit(1000 * x).laplace == pytest.approx(fit(x).laplace) and fit(torch.zeros(1000)) is None


def test_tensors_weigh_in_a_fit_by_their_size() -> None:
    large, small = laplace(30_000), normal(10_000)
    found = fit_tensors([torch.cat([large, small])], [[30_000, 10_000]])
    assert found.gauss == pytest.approx((3 * fit(large).gauss + fit(small).gauss) / 4)


def test_reads_are_counted_by_tensor() -> None:
    """The first tensor is found in one count. Of the second too few reach the fit, so it is counted once more."""
    v = torch.cat([torch.full((20_000,), 0.1), torch.full((3000,), 0.5)])
    v[:30], v[-5:] = torch.linspace(0.9, 1.0, 30), torch.tensor([1.0, 1.0, 1.0, 1.0, 1.5])
    quota, counts, before = quota_of(SEGMENTS, 0.001), Counts(), kernels.of
    with counting(v, counts):
        Laplace(stop="redsync").choose(v, quota, 0)
    assert kernels.of is before
    # moments, one count of both tensors, one of the second, the choice
    assert counts.reads == 3 * N + 3000


@pytest.mark.parametrize("name", SELECTORS)
def test_a_counted_step_is_a_step(name: str) -> None:
    counted, plain = (SelectorStep(name, [SEGMENTS], 0.001) for _ in range(2))
    counts = Counts()
    for seed in range(6):
        g = [laplace(N, seed)]
        plain.step(g)
        count_step(counted, g, counts)
    assert torch.equal(counted.v[0], plain.v[0]) and torch.equal(counted.u[0], plain.u[0])
    passes, sent = counts.row()["passes"], counts.row()["sent"]
    assert sent == 1 if name in ("exact", "predicted", "radix") else 0 < sent <= 1
    assert passes == {"exact": 1, "predicted": 0, "radix": 5}.get(name, passes)
    # kernels alone are counted, and a selector in plain PyTorch calls none
    assert passes > 0 or name not in ("sampled", "trimmed", "laplace")


def test_made_gradients_have_the_recorded_moments() -> None:
    mean, deviation = laplace(N), laplace(N, 1).abs()
    zeros = [torch.zeros(N)]
    gradients = Gradients(Recording("", [SEGMENTS], zeros, zeros, zeros, zeros, [mean], [deviation], 0.0))
    made = torch.stack([gradients.next()[0].clone() for _ in range(30)])
    assert torch.allclose(made.mean(0), mean, atol=float(deviation.max()))
    scores = (made - mean) / deviation
    assert float(scores.mean()) == pytest.approx(0, abs=0.01)
    assert float(scores.std()) == pytest.approx(1, rel=0.02)


def test_a_learner_keeps_what_it_does_not_send() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 10)
    learner = Learner(model, iter([(torch.randn(8, 20), torch.randint(10, (8,))) for _ in range(2)]), 0.05, lr=0.5)
    before = model.weight.detach().clone()
    learner.differentiate()
    g = learner.gradients[0][0].clone()
    (sent,) = learner.update()
    changed = (model.weight != before).flatten()
    assert int(sent.count) == int(changed.sum()) == 10
    assert torch.allclose((before - model.weight).flatten()[changed], 0.5 * g[changed])
    assert torch.equal(learner.v[0] == 0, changed)
    learner.differentiate()
    expected = g + MOMENTUM * g + learner.gradients[0][0]
    learner.update()
    still = ~changed & (learner.v[0] != 0)
    assert torch.allclose(learner.v[0][still], expected[still])


def test_decoding_reads_what_the_ranks_have_recorded() -> None:
    """All methods give one mean, the mean of the selections, and the table has the numbers of the work."""
    recording = decoding.Recording([SEGMENTS], 0.01, 3)
    for name in decoding.FORMATS:
        form = decoding.format_of(name)
        work = decoding.Decoding(recording, form, recording.payloads(form), 2)
        (bucket,), (union,) = recording.buckets, work.sparse()
        work.dense()
        dense = bucket.flat.clone()
        work.single()
        assert torch.equal(bucket.flat, dense) and int((dense != 0).sum()) <= 2 * 230, name
        assert torch.equal(union.indices[union.values != 0], dense.nonzero().view(-1)), name
        row = decoding.row_of(work, 2)
        assert row["payload_bytes"] == 2 * form.nbytes(recording.quotas[0].per_tensor, N), name
        assert row["union"] == pytest.approx(union.indices.numel() / N) and row["union"] < 0.02, name
        assert all(row[key] > 0 for key in (*decoding.RATIOS, "floor_ms", "dense_ms")), name
    exact = [torch.zeros(N).index_put_((s[0].indices.long(),), s[0].values) for s in recording.selections[:2]]
    form = decoding.format_of("fp32 int32")
    decoding.Decoding(recording, form, recording.payloads(form), 2).dense()
    assert torch.equal(recording.buckets[0].flat, (exact[0] + exact[1]) / 2)
    work.floor()
    assert not recording.buckets[0].flat.any()


PUBLISHED = {"dense": 7730, "powersgd-1": 25, "powersgd-2": 38, "powersgd-4": 64}


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_epoch_of_the_lstm_has_the_published_bytes(name: str) -> None:
    """Vogels et al. 2019, arXiv 1905.13727: MB (2**20 bytes) that a rank contributes per epoch of WikiText-2."""
    named = [(name, torch.zeros(p.shape, device="cpu")) for name, p in parameters_of("lstm")]
    taken = Method(name, named, 1)
    with torch.no_grad():
        taken.step(torch.zeros(taken.numel))
    assert round(taken.payload * 70 / 2**20) == PUBLISHED[name]


def test_the_size_of_the_large_transformer() -> None:
    assert sum(p.numel() for _, p in parameters_of("transformer-big")) == 209_125_376


EXPECTED_BYTES = {"dense": 4 * 2058, "fp16": 2 * 2058, "powersgd-2": 4 * (2 * (64 + 32) + 10) + 24}


@pytest.mark.parametrize("name", EXPECTED_BYTES)
def test_the_meter_counts_the_bytes_of_a_method(name: str) -> None:
    method = Method(name, [("matrix", torch.empty(64, 32)), ("vector", torch.empty(10))], 2)
    with torch.no_grad():
        seconds = method.step(torch.ones(2058))
    assert method.payload == method.wire == EXPECTED_BYTES[name] and min(seconds) > 0  # 2 ranks


@pytest.fixture(scope="module")
def rows_of_a_busy_machine() -> dict[str, Any]:
    args = Namespace(isas=supported_isas(), rounds=2, ranks=2, busy=True)
    method = Method("scaled-sign", [("matrix", torch.empty(64, 512))], 2, time.thread_time)
    try:
        rows = dict(measure(method, 1, None, args, time.thread_time))
    finally:
        choose_isa("")
    return {"method": method, "rows": rows}


def test_each_instruction_set_has_a_row(rows_of_a_busy_machine: Any) -> None:
    rows = rows_of_a_busy_machine["rows"]
    assert tuple(rows) == supported_isas()
    for isa, row in rows.items():
        assert row["isa"] == isa and row["payload_bytes"] == 24 + 4096 + 8


def test_the_least_times_count_on_a_busy_machine(rows_of_a_busy_machine: Any) -> None:
    for row in rows_of_a_busy_machine["rows"].values():
        assert row["encode"] == pytest.approx(row["encode_ms"] / row["encode_floor_ms"])
        numel = rows_of_a_busy_machine["method"].numel
        assert row["ns"] == pytest.approx(1e6 * (row["encode_ms"] + row["decode_ms"]) / numel)


def test_nothing_is_in_flight_at_the_ends_of_the_window_of_outer_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the speed alone is that beside an exchange, and the window has other exchanges than its own."""
    newest: dict[int, Any] = {}
    flights: list[tuple[bool, int]] = []

    class Recorded(outer_speed.Trainer):
        def __init__(self, name: str, settings: dict[str, Any], transport: Transport):
            super().__init__(name, settings, transport)
            newest[transport.rank] = self

    def make_work(name: str, batch: int, image: int, rank: int) -> Work:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(5)))
        return Work(model, lambda wrapped: wrapped(torch.ones(batch, 16)).square().mean())

    def build_small(name: str, **changes: Any) -> Any:
        return build(name, **changes, **({"fragment_mb": 1024 / 2**20} if "streaming" in name else {}))

    timed = outer_speed.seconds_per_step

    def seconds_per_step(trainer: Any, count: int, transport: Transport) -> float:
        exchange = newest[transport.rank].optimizer.method.exchange
        flights.append((exchange.flight, len(exchange.fragments)))
        seconds = timed(trainer, count, transport)
        flights.append((exchange.flight, len(exchange.fragments)))
        return seconds

    replaced = {"make_work": make_work, "seconds_per_step": seconds_per_step, "build": build_small}
    for name, value in {"Trainer": Recorded, **replaced}.items():
        monkeypatch.setattr(outer_speed, name, value)
    names = list(outer_speed.OUTER)

    def rank(every: int, delay: int, transport: Transport) -> list[tuple[float, float]]:
        settings = {"batch": 2, "steps": 2, "every": every, "delay": delay}
        alone = outer_speed.Trainer("alone", settings, transport)
        rows = [outer_speed.measured(name, alone, settings, transport) for name in names]
        return [(row["steps"], row["wire_bytes_per_step"]) for row in rows]

    # in the second case an exchange begins in the step in which the one before it ends
    for every, delay in ((20, 3), (20, 4), (7, 0)):
        flights.clear()
        found = LockstepWorld(2).run(lambda transport: rank(every, delay, transport))  # noqa: B023
        assert not any(flight for flight, _ in flights), (every, delay)
        assert {fragments for _, fragments in flights} == {1, 5}
        # each of the 5 fragments of 1 KiB once in a window: an all-reduce of two ranks sends what a rank has
        sent = {name: steps * nbytes for name, (steps, nbytes) in zip(names, found[0], strict=True)}
        assert sent["streaming"] == sent["diloco"] == 2 * sent["streaming-fp16"] == 5 * 1024, (every, delay)


def summary(task: Task, quality: float, wire: int = 5) -> dict[str, Any]:
    sent = {"wire_bytes": wire, "dense_wire_bytes": 5, "payload_bytes": 2 * wire, f"{task.item}s": 3000}
    return {"final": {task.metric: quality}, **sent, "seconds": 2.0, "training_seconds": 1.0}


def given(task: str, **more: Any) -> Namespace:
    return Namespace(**{"task": task, "epochs": None, "batch_size": None, "overrides": [], **more})


def test_a_run_depends_on_its_seed_alone(tmp_path: Path) -> None:
    def trained(name: str, seed: int) -> Any:
        words = ["--configs", "configs/digits/cnn.py", "configs/powersgd/rank2.py", "--devices", "cpu"]
        words += [f"--configs.seed={seed}", "--configs.train.num_epochs=1", "--configs.train.batch_size=90"]
        simulate(2, [*words, "--run-dir", str(tmp_path / name)])
        return json.loads((tmp_path / name / "summary.json").read_text())

    first, again, other = trained("first", 0), trained("again", 0), trained("other", 7)
    assert first["final"] == again["final"] != other["final"]
    assert 0 < first["payload_bytes"] == again["payload_bytes"] < first["dense_wire_bytes"] / 4


@pytest.fixture
def kept(tmp_path: Path) -> Any:
    """A run that `summary_of` has kept: its folder, what simulated it, and the command lines of its runs."""
    taken = []

    def simulated(ranks: int, words: Any) -> None:
        taken.append(words)
        (tmp_path / "kept").mkdir()
        (tmp_path / "kept" / "summary.json").write_text('{"seconds": 1}')

    assert summary_of(simulated, 2, ["--a"], tmp_path / "kept") == {"seconds": 1}
    return tmp_path / "kept", simulated, taken


def test_a_kept_run_is_not_repeated(kept: Any) -> None:
    directory, simulated, taken = kept
    assert summary_of(simulated, 2, ["--a"], directory) == {"seconds": 1} and taken == [["--a"]]


@pytest.mark.parametrize(("mode", "ranks", "words"), [("started", 2, ["--a"]), ("", 3, ["--a"]), ("", 2, ["--b"])])
def test_a_kept_run_is_not_taken_for_another_one(kept: Any, mode: str, ranks: int, words: list[str]) -> None:
    directory, simulated, _ = kept
    started = Mock(side_effect=AssertionError("the kept run would be replaced"), __name__="started")
    with pytest.raises(SystemExit, match="has a run of the other mode or with other arguments"):
        summary_of(started if mode else simulated, ranks, words, directory)


@pytest.mark.parametrize("name", METHODS_OF)
def test_every_method_of_a_task_is_a_stack_of_configs(name: str, tmp_path: Path) -> None:
    """The task names the config's metric and the key by which runs differ. A command line has the last word."""
    task = TASKS[name]
    for method in METHODS_OF[name]:
        words = to_train(given(name, overrides=["--configs.train.log_every=3"]), method, 1, tmp_path)
        args, overrides = parse_arguments(words)
        tree = load(args.configs, overrides)
        assert tree.train.metric == task.metric and tree.train.log_every == 3
        assert (tree.train.num_epochs, tree.train.batch_size) == (task.epochs, task.batch_size)
        assert (tree.seed, tree.dataset.get("fold")) == ((42, 1) if name == "digits" else (1, None))
        every = method.partition("-h")[2].partition("-")[0]
        if every.isdigit() and name == "pysource-long" and "zero" not in method:
            assert tree.train.local.average_every == int(every)


def test_a_report_of_one_run_each_has_no_standard_error(capsys: Printed) -> None:
    task = TASKS["digits"]
    report(task, rows_of(task, {"dense": [summary(task, 99.0)], "dgc": [summary(task, 98.0, wire=1)]}))
    *_, head, dense, dgc, last = capsys.readouterr().out.splitlines()
    result = json.loads(last, parse_constant=pytest.fail)["methods"]
    assert result["dgc"]["standard_error"] is None and result["dgc"]["difference"] == -1
    assert len(head) == len(dense) == len(dgc)
    assert dense.split() == ["dense", "99.00", "0.00", "1.0", "0.00", "1.0", "0.00", "2.0", "3,000"]


def test_differences_are_of_the_runs_with_the_same_seed() -> None:
    task = TASKS["digits"]
    one, other = summary(task, 99.0), summary(task, 98.0, wire=1)
    rows = rows_of(task, {"dense": [one, summary(task, 97.0)], "dgc": [other, summary(task, 97.0)]})
    assert rows["dgc"]["standard_error"] == 0.5 and rows["dgc"]["dense_over_wire"] == 10 / 6
    assert rows["dgc"]["runs"] == [98.0, 97.0]


def test_differences_of_bits_are_in_percent() -> None:
    bits = TASKS["pysource"]
    plain, sign = [summary(bits, 2.0), summary(bits, 2.5)], [summary(bits, 2.1, 1), summary(bits, 2.5, 1)]
    row = rows_of(bits, {"dense": plain, "sign": sign})["sign"]
    assert row["difference"] == pytest.approx(2.5) and row["standard_error"] == pytest.approx(2.5)
    assert row["first_over_payload"] == row["dense_over_wire"] == 5


@pytest.mark.parametrize(("name", "dgc_is_better"), [("numwords", False), ("lstm", True)])
def test_a_figure_has_better_methods_higher(name: str, dgc_is_better: bool, tmp_path: Path) -> None:
    """Fewer bits per character are better: the axis is inverted."""
    task = TASKS[name]
    rows = rows_of(task, {"dense": [summary(task, 3.0)], "dgc": [summary(task, 2.0, wire=1)]})
    draw(task, rows, "title", tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    assert task.quality in text and "title" in text
    heights = {label: float(y) for y, label in re.findall(r'y="([\d.]+)"[^>]*>(dense|dgc)</text>', text)}
    assert (heights["dgc"] < heights["dense"]) == dgc_is_better  # SVG counts downwards


def test_the_figure_of_more_ranks_says_what_it_shows(tmp_path: Path) -> None:
    sent = [{"ranks": size, "exchange_ms": 2.0 * size, "wire_bytes": 8.0 * size} for size in (2, 4, 8)]
    scale.draw({"dense": sent, "dgc": sent}, "a title", tmp_path / "scale.svg", work=0.1)
    assert "a title" in (text := (tmp_path / "scale.svg").read_text()) and "speed of one rank" in text


def test_a_comparison_ends_with_its_time(tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends in time leaves its summary alone. Others are continued. No run begins after it."""
    started, run = [], tmp_path / "run"

    def simulated(ranks: int, words: Any) -> None:
        started.append(words)
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        if len(started) == 2:
            (run / "summary.json").write_text('{"seconds": 1}')

    def summary(seconds: float) -> Any:
        return summary_of(simulated, 2, ["--a"], run, time.time() + seconds)

    assert summary(0) is None and not started
    assert summary(60) is None and (run / "checkpoints").exists()
    assert summary(60) == summary(0) == {"seconds": 1} and not (run / "checkpoints").exists()
    assert [words[:2] for words in started] == [["--a", "--minutes"]] * 2 and 0.9 < float(started[0][2]) <= 1
    with pytest.raises(SystemExit, match="75"):
        main([*PYSOURCE, "--methods", "dense", "fp16", "--simulate", "--minutes", "0", "--keep", str(tmp_path)])
    assert "2 of 2 runs are not finished: the same command continues" in capsys.readouterr().out
    # what it needs is said at once
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, message in (
        (["--model", "tiny"], "add --task pysource"),
        ([*PYSOURCE, "--minutes", "8"], "--minutes needs --keep FOLDER"),
        ([*PYSOURCE, "--device", "cuda"], "torch finds no GPU here"),
        (["--device", "cuda", "--methods", "adpsgd"], "cannot be simulated"),
        (["--simulate", "--methods", "ar", "adpsgd"], "adpsgd is asynchronous"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert message in capsys.readouterr().err
