"""The work of one rank in an experiment of train.py: its model, on batches of its data set or on random ones."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from dgc.advisor import workload
from dgc.advisor.workload import LossOf, Passes, Progress, Workload
from dgc.comm import Transport
from dgc_training.config import ConfigError
from dgc_training.faults.failure import UsageError
from dgc_training.startup.build import build_as
from dgc_training.stepping import AUTOCAST
from dgc_training.tasks.protocol import Batches, Setup, Task


def measure_workload(
    tree: DictConfig,
    device: torch.device,
    transport: Transport,
    shape: Sequence[int] | None,
    repeats: int,
    progress: Progress = lambda *of: None,
) -> Workload:
    """Measures forward and backward of an experiment.

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
    progress("the model", 0, workload.steps_of(repeats))
    model: nn.Module = build_as(nn.Module, tree.model).to(device).train()
    batches, loss_of, inputs = open_batches(tree, model, device, transport, shape)
    loss_of = under_autocast(loss_of, device, tree.train.precision)
    return workload.measure_workload(model, batches, loss_of, inputs, device, repeats, progress)


def open_batches(
    tree: DictConfig, model: nn.Module, device: torch.device, transport: Transport, shape: Sequence[int] | None
) -> tuple[Iterator[Passes], LossOf, str]:
    """Steps of the training data without end, or of random inputs, their loss, and which of both in words."""
    try:
        dataset = build_as(Mapping, tree.dataset)
    except ConfigError as error:
        if shape is None:
            raise UsageError(
                f"{error}. To measure the model with random inputs: --input-shape, such as 3 224 224"
            ) from error
        criterion = build_as(nn.Module, tree.train.criterion).to(device)
        steps = random_steps(tree, model, device, shape)
        words = f"random inputs of shape {tuple(shape)}, no data set"
        return steps, lambda model, batch: criterion(model(batch[0]), batch[1]), words
    task: Task = build_as(Task, tree.task, Setup(tree, dataset, model, transport, device))
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
