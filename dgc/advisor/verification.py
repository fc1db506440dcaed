"""Measured steps beside the predicted ones: the real optimizer on the real transport, all methods in turns.

Each method has a copy of the model and an optimizer as for a run. In every round each of them takes one
step that compresses, so that other load on the machines and the network meets all alike. The time of a step is
the time of the slowest rank, without the update of the parameters, as the median over the rounds after a warm-up:
its time is subtracted, and on a GPU it is left out. Forward and backward alone are measured in the same rounds:
where they differ from the prediction, the load has changed since.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from time import perf_counter

import torch
from torch import nn

from dgc.advisor.advice import Row, Work
from dgc.advisor.methods import GOSSIP, UNCOMPRESSED, Build
from dgc.advisor.workload import LossOf, Passes, Workload
from dgc.comm import Transport, all_gather_object, barrier
from dgc.optim import Wrapper
from dgc.units import human_time

MOST = 3  # methods that are verified beside the best one without compression
APART = 1.15  # times by which two measured steps differ if their order is compared with the predicted one
WARMUP = 3
ALONE = "work"  # in place of a method: forward and backward


def chosen(rows: Sequence[Row], every: bool = False) -> list[Row]:
    """The fastest row without compression, and the fastest methods, in the order of their predicted steps.

    Methods that lost more than the limit come last. With `every`, all the other rows follow. Gossip is left out:
    its messages from rank to rank need a transport of their own.
    """
    ordered = sorted((row for row in rows if row.name not in GOSSIP), key=lambda row: row.step)
    plain = next(row for row in ordered if row.name in UNCOMPRESSED)
    methods = sorted((row for row in ordered if row.name not in UNCOMPRESSED), key=lambda row: not row.within)
    best = [plain, *methods[:MOST]]
    return best + [row for row in ordered if row not in best] if every else best


def no_update(**sparse: object) -> None:
    """In place of the optimizer's step. Gradients and the residual go on as before."""


@dataclass
class Runner:
    """A model, and one method's optimizer. None: forward and backward alone."""

    model: nn.Module
    loss: LossOf
    optimizer: Wrapper | None

    def step(self, passes: Passes, transport: Transport, device: torch.device) -> float:
        """Takes a step and returns its seconds without the update of the parameters."""
        self.model.zero_grad() if self.optimizer is None else self.optimizer.zero_grad()
        barrier(transport, "advise.verify")
        updated = self._update
        start = perf_counter()
        for batch in passes:
            (self.loss(self.model, batch) / len(passes)).backward()
        if self.optimizer is not None:
            self.optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter() - start - (self._update - updated)

    @property
    def _update(self) -> float:
        return 0.0 if self.optimizer is None else self.optimizer.meter.seconds["step"]


def verify(
    rows: Sequence[Row],
    build_of: Callable[[Row], Build],
    workload: Workload,
    transport: Transport,
    device: torch.device,
    steps: int,
) -> dict[str, float]:
    """Measured seconds of a step, by method, and of forward and backward alone (`ALONE`). Collective.

    Args:
        rows: The methods.
        build_of: Makes a method's optimizer.
        workload: Model and batches.
        transport: Connects the ranks.
        device: Device of the model.
        steps: Measured steps of each method.
    """
    runners = {ALONE: Runner(workload.model, workload.loss, None)}
    for row in rows:
        model = deepcopy(workload.model)
        optimizer = build_of(row)(model, transport)
        if device.type == "cuda":  # the meter has the host's time of an update, not the device's
            optimizer.inner.step = no_update
        runners[row.name] = Runner(model, workload.loss, optimizer)
    times: dict[str, list[float]] = {name: [] for name in runners}
    for step in range(WARMUP + steps):
        passes = workload.batches[step % len(workload.batches)]
        for name, runner in runners.items():
            times[name].append(runner.step(passes, transport, device))
    for runner in runners.values():
        if runner.optimizer is not None:
            runner.optimizer.close()
    everyone = all_gather_object(transport, times, "advise.verify.times")
    return {
        name: median(max(repeat) for repeat in zip(*(of[name][WARMUP:] for of in everyone), strict=True))
        for name in runners
    }


def format_verification(rows: Sequence[Row], work: Work, measured: dict[str, float]) -> str:
    """Predictions beside measurements, as text."""
    lines = [f"{'step':<19} {'predicted':>11} {'measured':>11}"]
    for name, seconds in ((ALONE, work.seconds), *((row.name, row.compressed_step) for row in rows)):
        lines.append(f"{name:<19} {human_time(seconds):>11} {human_time(measured[name]):>11}")
    right, apart, wrong = order(rows, measured)
    lines += [f"{slow} was measured slower than {fast}, and predicted faster" for fast, slow in wrong]
    lines.append(f"{right} of {apart} pairs measured more than {APART - 1:.0%} apart are predicted in this order")
    return "\n".join(lines)


def order(rows: Sequence[Row], measured: dict[str, float]) -> tuple[int, int, list[tuple[str, str]]]:
    """How many pairs are predicted in the measured order, of how many that were measured apart; the others."""
    predicted = {row.name: row.compressed_step for row in rows}
    by_time = sorted(predicted, key=lambda name: measured[name])
    apart = [(fast, slow) for fast, slow in combinations(by_time, 2) if measured[slow] > APART * measured[fast]]
    wrong = [(fast, slow) for fast, slow in apart if predicted[fast] >= predicted[slow]]
    return len(apart) - len(wrong), len(apart), wrong
