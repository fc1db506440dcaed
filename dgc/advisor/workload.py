"""The work of one rank without communication: seconds of forward and backward, and gradients of real batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from dgc.comm import Transport, all_gather_object
from dgc.units import human_time

WARMUP = 2
GRADIENT_SETS = 3  # of different batches

Passes = Sequence[Any]  # the batches of a step's backward passes
Progress = Callable[[str, int, int], None]  # what is measured, its number, and the number of all
LossOf = Callable[[nn.Module, Any], Tensor]  # forward pass and mean loss of a batch


class WorkloadError(ValueError):
    """The work cannot be measured. The message says why."""


@dataclass
class Workload:
    """What one rank computes in a step.

    Attributes:
        model: The model.
        loss: Forward pass and mean loss of a batch.
        inputs: Where the inputs came from, in words.
        forward: Seconds of a step before its last backward pass.
        backward: Seconds of that backward pass.
        ready: By parameter, the share of that pass after which its gradient is complete.
        batches: Some of the batches.
        gradients: By batch, the gradient of each parameter that has one.
    """

    model: nn.Module
    loss: LossOf
    inputs: str
    forward: float
    backward: float
    ready: dict[str, float]
    batches: list[Passes]
    gradients: list[dict[str, Tensor]]

    @property
    def described(self) -> str:
        """Its times, as a line of the report."""
        return f"work       forward {human_time(self.forward)}, backward {human_time(self.backward)}, measured"

    def slowest(self, transport: Transport) -> "Workload":
        """The same work with the seconds of the slowest rank, and the order of rank 0. Collective."""
        own = self.forward, self.backward, self.ready
        everyone = all_gather_object(transport, own, "advise.workload")
        forward, backward = (max(of[i] for of in everyone) for i in range(2))
        return replace(self, forward=forward, backward=backward, ready=everyone[0][2])


def stamp(device: torch.device) -> Any:
    """The present time, on the device."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Seconds between two stamps."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def steps_of(repeats: int) -> int:
    """Number of steps of a measurement."""
    return WARMUP + max(repeats, GRADIENT_SETS)


def measure_workload(
    model: nn.Module,
    batches: Iterator[Passes],
    loss_of: LossOf,
    inputs: str,
    device: torch.device,
    repeats: int,
    progress: Progress = lambda *of: None,
) -> Workload:
    """Measures forward and backward, as the median over `repeats` steps after a warm-up.

    Args:
        model: In training mode, on `device`.
        batches: The batches of each step, without end.
        loss_of: Forward pass and mean loss of a batch.
        inputs: Where the batches come from, in words.
        device: Device of the model.
        repeats: Number of measured steps.
        progress: Called before each step: a step of a large model takes minutes.

    Raises:
        WorkloadError: The model trains no parameter, or its first loss or gradients are not finite.
    """
    steps = steps_of(repeats)
    stamps: dict[str, Any] = {}

    def note(name: str) -> Callable[[Tensor], None]:
        return lambda parameter: stamps.__setitem__(name, stamp(device))

    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise WorkloadError("the model has no parameter that requires a gradient, so that nothing is exchanged")
    hooks = [p.register_post_accumulate_grad_hook(note(name)) for name, p in named]
    forward, backward, shares = [], [], []
    gradients: list[dict[str, Tensor]] = []
    kept: list[Passes] = []
    for step in range(steps):
        progress("forward and backward", step + 1, steps)
        passes = next(batches)
        model.zero_grad()
        stamps.clear()
        start = stamp(device)
        for number, batch in enumerate(passes, 1):
            loss = loss_of(model, batch)
            if step == 0:  # it is not timed, so that it may wait for a GPU
                check_loss(loss)
            loss = loss / len(passes)
            if number == len(passes):
                middle = stamp(device)
            loss.backward()
        end = stamp(device)
        if step == 0:
            check_gradients({name: p.grad for name, p in named if p.grad is not None})
        if step < WARMUP:
            continue
        forward.append(seconds_between(start, middle))
        backward.append(whole := seconds_between(middle, end))
        shares.append({name: min(seconds_between(middle, at) / whole, 1.0) for name, at in stamps.items()})
        if len(gradients) < GRADIENT_SETS:
            kept.append(passes)
            gradients.append({name: p.grad.detach().clone() for name, p in named if p.grad is not None})
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    ready = {name: median(share.get(name, 1.0) for share in shares) for name, _ in named}
    return Workload(model, loss_of, inputs, median(forward), median(backward), ready, kept, gradients)


def check_loss(loss: Any) -> None:
    """Raises WorkloadError for a loss without a backward pass, or one that is not finite."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise WorkloadError(f"the loss is a {type(loss).__name__}{shape}, not a tensor of one element")
    if not loss.requires_grad:
        raise WorkloadError("the loss depends on no parameter that requires a gradient")
    if not loss.isfinite().all():
        raise WorkloadError(f"the loss of the first batch is {loss.item()}: check the model and the batch")


def check_gradients(gradients: Mapping[str, Tensor]) -> None:
    """Raises WorkloadError if there is no gradient, or one that is not finite."""
    if not gradients:
        raise WorkloadError("backward gives no parameter a gradient")
    for name, gradient in gradients.items():
        if not gradient.isfinite().all():
            raise WorkloadError(f"the gradient of {name} is not finite in the first step: check model and batch")
