"""The work of one rank without communication: seconds of forward and backward, and gradients of real batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from dgc.comm import Transport, all_gather_object
from dgc_training.config import ConfigError
from dgc_training.faults.failure import UsageError
from dgc_training.startup.build import build
from dgc_training.stepping import AUTOCAST
from dgc_training.tasks.protocol import Batches, Setup, Task

WARMUP = 2
GRADIENT_SETS = 3  # of different batches

Passes = Sequence[Any]  # the batches of a step's backward passes
Progress = Callable[[str, int, int], None]  # what is measured, its number, and the number of all
LossOf = Callable[[nn.Module, Any], Tensor]  # forward pass and mean loss of a batch


@dataclass
class Workload:
    """What one rank computes in a step.

    Attributes:
        model: The model, as built from the config.
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


def measure_workload(
    tree: DictConfig,
    device: torch.device,
    transport: Transport,
    shape: Sequence[int] | None,
    repeats: int,
    progress: Progress = lambda *of: None,
) -> Workload:
    """Measures forward and backward, as the median over `repeats` batches after a warm-up.

    Args:
        tree: The config of the experiment.
        device: Device of the model.
        transport: Its rank takes its share of the data.
        shape: Of one sample, for random inputs where the data set is missing.
        repeats: Number of measured steps.
        progress: Called before the model is built and before each step: a step of a large model takes minutes.

    Raises:
        UsageError: The data set cannot be read, and `shape` is None or does not fit the model.
        ConfigError: A part cannot be built.
    """
    steps = WARMUP + max(repeats, GRADIENT_SETS)
    progress("the model", 0, steps)
    model = build(tree.model).to(device).train()
    batches, loss_of, inputs = open_batches(tree, model, device, transport, shape)
    loss_of = under_autocast(loss_of, device, tree.train.precision)
    stamps: dict[str, Any] = {}

    def note(name: str) -> Callable[[Tensor], None]:
        return lambda parameter: stamps.__setitem__(name, stamp(device))

    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
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
            loss = loss_of(model, batch) / len(passes)
            if number == len(passes):
                middle = stamp(device)
            loss.backward()
        end = stamp(device)
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


def open_batches(
    tree: DictConfig, model: nn.Module, device: torch.device, transport: Transport, shape: Sequence[int] | None
) -> tuple[Iterator[Passes], LossOf, str]:
    """Steps of the training data without end, or of random inputs, their loss, and which of both in words."""
    try:
        dataset = build(tree.dataset)
    except ConfigError as error:
        if shape is None:
            raise UsageError(
                f"{error}. To measure the model with random inputs: --input-shape, such as 3 224 224"
            ) from error
        criterion = build(tree.train.criterion).to(device)
        steps = random_steps(tree, model, device, shape)
        words = f"random inputs of shape {tuple(shape)}, no data set"
        return steps, lambda model, batch: criterion(model(batch[0]), batch[1]), words
    task: Task = build(tree.task, Setup(tree, dataset, model, transport, device))
    words = f"the data set, batches of {tree.train.batch_size}"
    return endless(task.batches), lambda model, batch: task.loss(model, batch).mean, words


def under_autocast(loss_of: LossOf, device: torch.device, precision: str) -> LossOf:
    """The loss with train.precision. A loss scale, which fp16 has, is left out: it costs next to nothing."""
    dtype = AUTOCAST[precision]

    def cast(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(device.type, dtype):
            return loss_of(model, batch)

    return loss_of if dtype is None else cast


def endless(batches: Batches) -> Iterator[Passes]:
    """All steps of epoch 0, 1, ..."""
    epoch = 0
    while True:
        for _, passes in batches.epoch(epoch):
            yield passes
        epoch += 1


def random_steps(
    tree: DictConfig, model: nn.Module, device: torch.device, shape: Sequence[int]
) -> Iterator[Passes]:
    """Normally distributed inputs, and classes of a classifier drawn uniformly."""
    batch = tree.train.batch_size
    try:
        with torch.no_grad():
            outputs = model(torch.randn(batch, *shape, device=device))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--input-shape {' '.join(map(str, shape))} does not fit the model: {reason}") from error
    if not isinstance(outputs, Tensor) or outputs.dim() != 2:
        raise UsageError("--input-shape: random targets can be made for a classifier only; prepare the data set")

    def steps() -> Iterator[Passes]:
        while True:
            inputs = [torch.randn(batch, *shape, device=device) for _ in range(tree.train.num_batches_per_step)]
            yield [(x, torch.randint(outputs.shape[1], (batch,), device=device)) for x in inputs]

    return steps()
