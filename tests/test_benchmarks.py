"""What benchmarks compute beside times."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import benchmarks
import dgc.kernels as kernels
from benchmarks import decoding, scale, scale_order
from benchmarks.recordings import MOMENTUM, Gradients, Learner, Recording
from benchmarks.results import print_json
from benchmarks.selector_counts import Counts, count_choice, count_step, counting
from benchmarks.selector_fit import Fit, fit, fit_tensors
from benchmarks.selector_methods import SELECTORS, SelectorStep
from dgc.bucket import lay_out
from dgc.cost import Compute, Message, Traffic
from dgc.selection import Bisection, Exact, Predicted, plan_selection

SEGMENTS = lay_out([("a", torch.empty(100, 200, device="meta")), ("b", torch.empty(30, 100, device="meta"))])
N = 23_000


def laplace(n: int, seed: int = 0) -> torch.Tensor:
    u = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5
    return (-3 * u.sign() * torch.log1p(-2 * u.abs())).float()


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_results_are_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [math.nan, 1, {"b": -math.inf, "c": "x", "d": None}]})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"a": [None, 1, {"b": None, "c": "x", "d": None}]}
    folder = Path(benchmarks.__file__).parent
    files = {file.name: file.read_text() for file in folder.rglob("*.py")}
    # throughput.py needs nothing but Python's own library, and has no NaN
    assert sorted(name for name, text in files.items() if "json.dump" in text) == ["results.py", "throughput.py"]
    assert sum("print_json(" in text for text in files.values()) > 9


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
    assert found is not None
    assert found.gauss == pytest.approx((3 * fitted(large).gauss + fitted(small).gauss) / 4)


def test_reads_of_an_estimator_are_counted_by_tensor() -> None:
    """The first tensor is found in one count; the second, nothing but equal numbers, is counted once more."""
    v = torch.cat([torch.full((20_000,), 0.1), torch.ones(3000)])
    v[:30] = torch.linspace(0.9, 1.0, 30)
    plan, counts = plan_selection(SEGMENTS, 0.001), Counts()
    before = kernels.of
    with counting(v, counts):
        selection = Bisection().choose(v, plan, 0)
    counts.add(v, plan, selection)
    assert kernels.of is before
    row = counts.row()
    # moments, one count of both tensors, one of the second, the choice
    assert row["passes"] == pytest.approx(3 + 3000 / N)
    assert row["reached"] == pytest.approx((30 + 3000) / 23)
    assert row["sent"] == 1


def test_exact_reads_once_and_sends_the_largest() -> None:
    v, plan = laplace(N), plan_selection(SEGMENTS, 0.001)
    row = count_choice(Exact(), [v], [plan], 1).row()
    largest = torch.cat([v[:20_000].abs().topk(20).values, v[20_000:].abs().topk(3).values])
    assert (row["passes"], row["sent"], row["reached"]) == (1, 1, 1)
    assert row["energy"] == pytest.approx(float(largest.square().sum() / v.square().sum()), rel=1e-5)


@pytest.mark.parametrize("name", SELECTORS)
def test_a_counted_step_is_a_step(name: Any) -> None:
    counted, plain = (SelectorStep(name, [SEGMENTS], 0.001, "cpu") for _ in range(2))
    counts = Counts()
    for seed in range(6):
        g = [laplace(N, seed)]
        plain.step(g)
        count_step(counted, g, counts)
    assert torch.equal(counted.v[0], plain.v[0])
    assert torch.equal(counted.u[0], plain.u[0])
    assert 0 < counts.row()["sent"] <= 1
    assert (counts.row()["passes"] > 0) == (name not in ("histogram", "predicted"))


def test_a_prediction_reaches_no_less_than_it_sends() -> None:
    method, counts = SelectorStep("predicted", [SEGMENTS], 0.001, "cpu"), Counts()
    for seed in range(8):
        count_step(method, [laplace(N, seed)], counts)
    assert isinstance(method.selector, Predicted)
    assert counts.row()["sent"] == 1
    assert counts.row()["reached"] > 0


def test_made_gradients_have_the_recorded_mean_and_deviation() -> None:
    mean, deviation = laplace(N), laplace(N, 1).abs()
    zeros = [torch.zeros(N)]
    gradients = Gradients(Recording("", [SEGMENTS], zeros, zeros, zeros, zeros, [mean], [deviation], 0.0, 0.0))
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
    assert int(sent.count) == 10
    changed = (model.weight != before).flatten()
    assert int(changed.sum()) == 10
    assert torch.allclose((before - model.weight).flatten()[changed], 0.5 * g[changed])
    assert torch.equal(learner.v[0] == 0, changed)
    kept = ~changed
    learner.differentiate()
    expected = g + MOMENTUM * g + learner.gradients[0][0]
    learner.update()
    still = kept & (learner.v[0] != 0)
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


def test_pairs_in_another_order_than_measured_are_found() -> None:
    measured = {"dense": {2: 1.0}, "fp16": {2: 2.0}, "dgc": {2: 3.0}, "sign": {2: 3.1}}
    predicted = {"dense": {2: 9.0}, "fp16": {2: 1.0}, "dgc": {2: 2.0}, "sign": {2: 1.5}}
    # dense and fp16 are fitted, and dgc and sign are less than 15 % apart
    lines = [
        {"ranks": 2, "methods": {name: {"exchange_ms": 1e3 * of[2] * noise} for name, of in measured.items()}}
        for noise in (1.0, 3.0, 0.1)
    ]
    middle = scale_order.medians(lines, measured)
    assert middle == {name: {2: pytest.approx(of[2])} for name, of in measured.items()}
    assert scale_order.wrong_pairs(measured, predicted) == (4, [(2, "dense", "dgc"), (2, "dense", "sign")])


def test_the_network_is_fitted_to_dense_and_fp16() -> None:
    network = scale_order.network_of((1e-5, 1e-9, 2e-10, 5e-10), 8, 2)
    payload = {"dense": 8 * 10**7, "fp16": 4 * 10**7}
    work: scale_order.Work = {}
    for name, nbytes in payload.items():
        work[name] = {}
        for size in (2, 4, 8):
            sent = 2 * nbytes * (size - 1) / size
            message = Message("AllReduce", size, size, nbytes, sent, 0, name == "fp16", 0)
            work[name][size] = Traffic(size, size, ((message,),), 0.0, 0.0), Compute(0.01)
    noop = dict.fromkeys((2, 4, 8), 0.002)
    measured = scale_order.predictions(work, network, noop)
    found = scale_order.predictions(work, scale_order.fitted(work, measured, noop, 8, 2), noop)
    for name, of in measured.items():
        assert found[name] == pytest.approx(of, rel=0.02)
