"""When benchmarks.outer_speed measures."""

from typing import Any

import pytest
import torch

from benchmarks import outer_speed
from benchmarks.train_step import Work
from dgc.comm import Transport
from dgc.comm.lockstep import LockstepWorld
from scripts.methods import build


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

    measure = outer_speed.seconds_per_step

    def seconds_per_step(trainer: Any, count: int, transport: Transport) -> float:
        exchange = newest[transport.rank].optimizer.method.exchange
        flights.append((exchange.flight, len(exchange.fragments)))
        seconds = measure(trainer, count, transport)
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
