"""What benchmarks compute beside times, the bytes of large models by their shapes, and when they measure."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import benchmarks
import dgc.kernels as kernels
from benchmarks import decoding, harness, outer_speed, scale
from benchmarks.__main__ import main
from benchmarks.methods import Method, parameters_of
from benchmarks.recordings import MOMENTUM, Gradients, Learner, Recording
from benchmarks.selectors import Counts, Fit, SelectorStep, count_step, counting, fit, fit_tensors
from benchmarks.train_step import Work
from dgc.bucket import lay_out
from dgc.comm import Transport
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import SparseCompressor
from dgc.selection import Bisection, plan_selection
from scripts.methods import METHODS, SELECTORS, build

SEGMENTS = lay_out([("a", torch.empty(100, 200, device="meta")), ("b", torch.empty(30, 100, device="meta"))])
N = 23_000


def laplace(n: int, seed: int = 0) -> torch.Tensor:
    u = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5
    return (-3 * u.sign() * torch.log1p(-2 * u.abs())).float()


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_results_are_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    harness.print_json({"a": [math.nan, 1, {"b": -math.inf, "c": "x", "d": None}]})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"a": [None, 1, {"b": None, "c": "x", "d": None}]}
    files = {file.name: file.read_text() for file in Path(benchmarks.__file__).parent.glob("*.py")}
    # throughput.py needs nothing but Python's own library, and has no NaN
    assert sorted(name for name, text in files.items() if "json.dump" in text) == ["harness.py", "throughput.py"]


def test_methods_take_turns_and_ratios_are_those_of_a_round() -> None:
    order: list[tuple[int, str]] = []

    def work(name: str, number: int) -> float:
        order.append((number, name))
        return number + {"a": 1.0, "b": 3.0, "slow": 5.0}[name]

    works = {name: (lambda number, name=name: work(name, number)) for name in ("a", "b", "slow")}
    rounds: list[int] = []
    found = harness.in_turns(works, 7, 2, slow=["slow"], before=rounds.append)
    assert rounds == list(range(-2, 7)) and list(found["a"]) == list(range(7)) and list(found["slow"]) == [0, 6]
    by_round = [[name for number, name in order if number == i] for i in range(7)]
    assert len({tuple(names) for names in by_round}) > 1 and {len(names) for names in by_round} == {2, 3}
    assert harness.middle(found["b"]) == 6.0
    assert harness.ratio(found["b"], found["a"]) == 1.5  # 3/1, 4/2, 5/3, 6/4, ...: the median of round 3
    assert harness.ratio(found["slow"], found["a"]) == (5 + 11 / 7) / 2


def test_a_table_has_aligned_columns_and_keeps_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [("ms", "median ms", "10.2f"), ("n", "sent", "8,d"), ("share", "share", "7.1%")]
    table = harness.Table("method", 8, columns)
    table.add("a", {"ms": 1.234, "n": 12345, "share": 0.5, "other": 1})
    table.add("b", {"n": 1, "share": None})
    assert capsys.readouterr().out == (
        "\nmethod   median ms    sent  share\na             1.23  12,345  50.0%\nb                        1\n"
    )
    assert table.rows["a"]["other"] == 1 and list(table.rows) == ["a", "b"]


def test_the_list_has_a_name_a_duration_and_a_line_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    lines = capsys.readouterr().out.splitlines()
    files = Path(benchmarks.__file__).parent.glob("*.py")
    listed = sorted(file.stem for file in files if "\nTAKES = " in file.read_text())
    assert [line.split()[0] for line in lines[::2]] == listed
    assert all(line.startswith(" " * 17) and line.strip() for line in lines[1::2])


def test_every_method_of_the_table_is_built() -> None:
    """Files and changes fit their constructors, a ratio warm-up is off, and a row's own ratio is kept."""
    found = {name: build(name, 0.25) for name in METHODS}
    sparse = {name: of for name, of in found.items() if isinstance(of, SparseCompressor)}
    own = {name: of.compress_ratio for name, of in sparse.items() if of.compress_ratio != 0.25}
    assert own == {"dgc-1-percent": 0.01, "dgc-residual-0.1-percent": 0.001, "dgc-adam-0.1-percent": 0.001}
    assert len(sparse) > 20
    assert build("streaming", delay=3).delay == 3 and build("diloco").average_every == 50


def fitted(x: Tensor) -> Fit:
    found = fit(x)
    assert found is not None
    return found


def test_a_distribution_fits_its_own_samples() -> None:
    assert fitted(laplace(50_000)).ratio < 0.2
    assert fitted(5 + normal(50_000)).ratio > 5


def test_the_distance_is_that_between_the_distributions() -> None:
    """Of a standard normal to the Laplace of its mean distance: by midpoints, in fp64, without samples."""
    p = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000
    width = math.sqrt(2 / math.pi)
    other = -width * (p - 0.5).sign() * torch.log1p(-2 * (p - 0.5).abs())
    expected = float((torch.special.ndtri(p) - other).abs().mean())
    assert fitted(normal(200_000)).laplace == pytest.approx(expected, rel=0.03)


def test_zeros_and_scales_do_not_change_a_fit() -> None:
    x = laplace(20_000)
    assert fit(torch.cat([x, torch.zeros(5000)])) == fit(x)
    assert fitted(1000 * x).laplace == pytest.approx(fitted(x).laplace)
    assert fit(torch.zeros(1000)) is None


def test_tensors_weigh_by_their_size() -> None:
    large, small = laplace(30_000), normal(10_000)
    found = fit_tensors([torch.cat([large, small])], [[30_000, 10_000]])
    assert found.gauss == pytest.approx((3 * fitted(large).gauss + fitted(small).gauss) / 4)


def test_reads_of_an_estimator_are_counted_by_tensor() -> None:
    """The first tensor is found in one count; the second, nothing but equal numbers, is counted once more."""
    v = torch.cat([torch.full((20_000,), 0.1), torch.ones(3000)])
    v[:30] = torch.linspace(0.9, 1.0, 30)
    plan, counts, before = plan_selection(SEGMENTS, 0.001), Counts(), kernels.of
    with counting(v, counts):
        Bisection().choose(v, plan, 0)
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
    assert passes == {"exact": 1, "histogram": 0, "predicted": 0, "radix": 5}.get(name, passes)
    assert (passes > 0) == (name not in ("histogram", "predicted"))


def test_made_gradients_have_the_recorded_mean_and_deviation() -> None:
    mean, deviation = laplace(N), laplace(N, 1).abs()
    zeros = [torch.zeros(N)]
    gradients = Gradients(Recording("", [SEGMENTS], zeros, zeros, zeros, zeros, [mean], [deviation], 0.0))
    made = torch.stack([gradients.next()[0].clone() for _ in range(30)])
    assert torch.allclose(made.mean(0), mean, atol=float(deviation.max()))
    scores = (made - mean) / deviation
    assert float(scores.mean()) == pytest.approx(0, abs=0.01)
    assert float(scores.std()) == pytest.approx(1, rel=0.02)


def test_a_learner_takes_steps_of_dgc() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 10)
    batches = iter([(torch.randn(8, 20), torch.randint(10, (8,))) for _ in range(2)])
    learner = Learner(model, batches, 0.05, lr=0.5)
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
    """All methods give one mean, that of the selections, and the table's numbers are those of the work."""
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
        assert row["payload_bytes"] == 2 * form.nbytes(recording.plans[0].per_tensor, N), name
        assert row["union"] == pytest.approx(union.indices.numel() / N) and row["union"] < 0.02, name
        assert all(row[key] > 0 for key in (*decoding.RATIOS, "floor_ms", "dense_ms")), name
    exact = [torch.zeros(N).index_put_((s[0].indices.long(),), s[0].values) for s in recording.selections[:2]]
    form = decoding.format_of("fp32 int32")
    decoding.Decoding(recording, form, recording.payloads(form), 2).dense()
    assert torch.equal(recording.buckets[0].flat, (exact[0] + exact[1]) / 2)
    work.floor()
    assert not recording.buckets[0].flat.any()


def test_the_figure_of_scales_is_drawn(tmp_path: Path) -> None:
    rows = [{"ranks": size, "exchange_ms": 2.0 * size, "wire_bytes": 8.0 * size} for size in (2, 4, 8)]
    scale.draw({"dense": rows, "dgc": rows}, "a title", tmp_path / "scale.svg", work=0.1)
    assert "a title" in (text := (tmp_path / "scale.svg").read_text()) and "that of one rank" in text


@pytest.mark.parametrize(
    ("method", "published"), [("dense", 7730), ("powersgd-1", 25), ("powersgd-2", 38), ("powersgd-4", 64)]
)
def test_an_epoch_of_the_lstm_has_the_published_bytes(method: str, published: int) -> None:
    """Vogels et al. 2019, arXiv 1905.13727: MB (2**20 bytes) that a rank contributes per epoch of WikiText-2."""
    named = [(name, torch.zeros(p.shape, device="cpu")) for name, p in parameters_of("lstm")]
    taken = Method(method, named, 1)
    with torch.no_grad():
        taken.step(torch.zeros(taken.numel))
    assert round(taken.payload * 70 / 2**20) == published


def test_the_shapes_are_those_of_the_configs() -> None:
    assert sum(p.numel() for _, p in parameters_of("transformer-big")) == 209_125_376


def test_bytes_are_those_of_the_meter() -> None:
    named = [("matrix", torch.empty(64, 32)), ("vector", torch.empty(10))]
    for name, expected in ("dense", 4 * 2058), ("fp16", 2 * 2058), ("powersgd-2", 4 * (2 * (64 + 32) + 10) + 24):
        method = Method(name, named, 2)
        with torch.no_grad():
            seconds = method.step(torch.ones(2058))
        assert method.payload == method.wire == expected and min(seconds) > 0, name  # 2 ranks


def test_nothing_is_in_flight_at_the_ends_of_the_window_of_outer_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the speed alone is that beside an exchange, and the window has other exchanges than its own."""
    newest: dict[int, Any] = {}
    flights: list[tuple[bool, int]] = []

    class Recorded(outer_speed.Trainer):
        def __init__(self, name: str, settings: dict[str, Any], transport: Transport):
            super().__init__(name, settings, transport)
            newest[transport.rank] = self

    def tiny(name: str, batch: int, image: int, rank: int) -> Work:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(5)))
        return Work(model, lambda wrapped: wrapped(torch.ones(batch, 16)).square().mean())

    def small(name: str, **changes: Any) -> Any:
        return build(name, **changes, **({"fragment_mb": 1024 / 2**20} if "streaming" in name else {}))

    timed = outer_speed.seconds_per_step

    def seconds_per_step(trainer: Any, count: int, transport: Transport) -> float:
        exchange = newest[transport.rank].optimizer.method.exchange
        flights.append((exchange.flight, len(exchange.fragments)))
        seconds = timed(trainer, count, transport)
        flights.append((exchange.flight, len(exchange.fragments)))
        return seconds

    monkeypatch.setattr(outer_speed, "Trainer", Recorded)
    monkeypatch.setattr(outer_speed, "make_work", tiny)
    monkeypatch.setattr(outer_speed, "seconds_per_step", seconds_per_step)
    monkeypatch.setattr(outer_speed, "build", small)
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
