"""What benchmarks.outer_steps computes from its runs' summaries and trains, and when outer_speed measures."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import outer_steps
from benchmarks.convergence.runs import summary_of
from benchmarks.outer_speed import ranks as outer_speed
from benchmarks.train_step.models import Work
from dgc.comm import Transport
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import FP16Compressor
from dgc.local import ZeroOneSteps
from dgc.optim import LocalOptimizer
from dgc_training.config import instantiate, load
from dgc_training.startup.arguments import parse_arguments

DENSE = {"payload_bytes": 4000, "wire_bytes": 6000, "dense_wire_bytes": 6000, "seconds": 1.0}
SPARSE = {"payload_bytes": 20, "wire_bytes": 60, "dense_wire_bytes": 6000, "seconds": 1.0}


def run(bits: float, counts: dict[str, Any]) -> dict[str, Any]:
    return {**counts, "final": {outer_steps.BITS: bits}}


def test_a_row_is_compared_with_dense_seed_by_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summaries = {"dense": [run(2.0, DENSE), run(2.5, DENSE)], "sparse64-h10": [run(2.1, SPARSE), run(2.5, SPARSE)]}
    found = outer_steps.rows(20, summaries)
    row = found["sparse64-h10"]
    assert row["to_dense_percent"] == pytest.approx(2.5) and row["standard_error"] == pytest.approx(2.5)
    assert (row["fewer_payload"], row["fewer_wire"], row["payload_per_step"]) == (200, 100, 1)
    assert (row["exchanges"], found["dense"]["exchanges"]) == (2, 20)
    outer_steps.print_table(found)
    assert len({len(line) for line in capsys.readouterr().out.splitlines()[1:]}) == 1
    outer_steps.draw(found, "title", tmp_path / "a.svg")
    assert "sparse64-h10" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize("method", sorted(set(outer_steps.METHODS) - {"dense"}))
def test_every_method_starts_and_exchanges_as_often_as_its_row_says(method: str) -> None:
    args = argparse.Namespace(width=64, batch_size=8, steps=2000, overrides=[])
    parsed, overrides = parse_arguments(outer_steps.words(args, method, 1, Path("run")))
    tree = load(parsed.configs, overrides)
    algorithm, model = instantiate(tree.train.local), instantiate(tree.model)
    optimizer = instantiate(tree.train.optimizer, model.parameters())
    LocalOptimizer(optimizer, model.named_parameters(), algorithm, transport=LockstepWorld(1).transports[0])
    if isinstance(algorithm, ZeroOneSteps):
        assert outer_steps.exchanges(method, 2000) == algorithm.schedule.exchanges(2000)
        assert isinstance(algorithm.gradients, FP16Compressor)
    else:
        assert outer_steps.exchanges(method, 2000) == 2000 // algorithm.average_every


def test_finished_runs_are_not_trained_again(tmp_path: Path) -> None:
    """A run is finished if it has a summary and was started with the same arguments."""
    place, summaries = tmp_path / "runs/dense-1", iter([run(2.0, DENSE), run(2.2, SPARSE)])

    def train(ranks: int, words: Sequence[str]) -> None:
        place.mkdir(exist_ok=True)
        (place / "summary.json").write_text(json.dumps(next(summaries)))

    words = ["--run-dir", str(place), "--configs.seed=1"]
    assert summary_of(train, 4, words, place) == summary_of(train, 4, words, place) == run(2.0, DENSE)
    for ranks, others in ((2, words), (4, [*words[:2], "--configs.seed=2"])):
        with pytest.raises(SystemExit, match="dense-1 has a run .*with other arguments: remove it"):
            summary_of(train, ranks, others, place)
    (place / "summary.json").unlink()
    assert summary_of(train, 4, words, place) == run(2.2, SPARSE)


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

    measure = outer_speed.seconds_per_step

    def seconds_per_step(trainer: Any, count: int, transport: Transport) -> float:
        exchange = newest[transport.rank].optimizer.method.exchange
        flights.append((exchange.flight, len(exchange.fragments)))
        seconds = measure(trainer, count, transport)
        flights.append((exchange.flight, len(exchange.fragments)))
        return seconds

    monkeypatch.setattr(outer_speed, "Trainer", Recorded)
    monkeypatch.setattr(outer_speed, "make", tiny)
    monkeypatch.setattr(outer_speed, "seconds_per_step", seconds_per_step)
    monkeypatch.setattr(outer_speed, "FRAGMENT_MB", 1024 / 2**20)
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
