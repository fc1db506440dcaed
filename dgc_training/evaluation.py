"""Evaluation over all ranks. Every sample is counted once; batch norm statistics are averaged over the ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, Dataset

from dgc.comm import Transport, all_reduce
from dgc_training.config import ConfigError, instantiate
from dgc_training.constructors import of_kind
from dgc_training.data import evaluation_loader, to_device
from dgc_training.meters import Meter


def batch_norm_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Floating-point running statistics of every batch norm, by buffer name. A shared module is listed once."""
    buffers: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    buffers[f"{prefix}.{name}" if prefix else name] = buffer
    return buffers


@contextmanager
def averaged_batch_norm(model: nn.Module, transport: Transport) -> Iterator[None]:
    """Context manager that replaces running statistics by their mean over all ranks, and restores them on exit.

    Collective: every rank must enter it.
    """
    buffers = list(batch_norm_buffers(model).values())
    if not buffers or transport.size == 1:
        yield
        return
    own = [buffer.clone() for buffer in buffers]
    flat = torch.cat([buffer.flatten().float() for buffer in buffers])
    mean = all_reduce(transport, flat, op="mean", name="batch_norm")
    for buffer, values in zip(buffers, mean.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(values.view_as(buffer))
    try:
        yield
    finally:
        for buffer, values in zip(buffers, own, strict=True):
            buffer.copy_(values)


def sum_over_ranks(meters: Mapping[str, Meter], transport: Transport, device: torch.device) -> None:
    """Replaces the sums of every meter by the sums over all ranks, with one collective."""
    sums = {(name, key): value for name in sorted(meters) for key, value in sorted(meters[name].data().items())}
    if not sums:
        return
    total = all_reduce(
        transport,
        torch.tensor(list(sums.values()), dtype=torch.float64, device=device),
        op="sum",
        name="meters",
    ).tolist()
    totals = dict(zip(sums, total, strict=True))
    for name, meter in meters.items():
        meter.set({key: value for (owner, key), value in totals.items() if owner == name})


def evaluate(
    model: nn.Module,
    loaders: Mapping[str, Iterable[Any]],
    make_meters: Callable[[str], Mapping[str, Meter]],
    transport: Transport,
    device: torch.device,
    forward: Callable[[nn.Module, Any], tuple[Tensor, Tensor]] | None = None,
) -> dict[str, float]:
    """Evaluates the model on every split of `loaders`. Returns results by meter name, equal on every rank.

    Args:
        make_meters: returns new meters for a split, by result name. The names must be equal on every rank.
        forward: returns outputs and targets of a batch; None: a batch is (inputs, targets).
    """
    training = model.training
    model.eval()
    meters: dict[str, Meter] = {}
    with averaged_batch_norm(model, transport), torch.no_grad():
        for split, loader in loaders.items():
            split_meters = make_meters(split)
            for batch in loader:
                if forward is None:
                    inputs, targets = to_device(batch, device)
                    outputs = model(inputs)
                else:
                    outputs, targets = forward(model, batch)
                for meter in split_meters.values():
                    meter.update(outputs, targets)
            meters.update(split_meters)
    model.train(training)
    sum_over_ranks(meters, transport, device)
    return {name: meter.compute() for name, meter in meters.items()}


def evaluation_loaders(
    dataset: Mapping[str, Dataset[Any]],
    batch_size: int,
    transport: Transport,
    device: torch.device,
    num_workers: int = 0,
) -> dict[str, DataLoader[Any]]:
    """Loaders of this rank's share of every split except 'train'."""
    return {
        split: evaluation_loader(
            dataset[split],
            batch_size,
            rank=transport.rank,
            size=transport.size,
            pin_memory=device.type == "cuda",
            num_workers=num_workers,
        )
        for split in dataset
        if split != "train"
    }


class Evaluation:
    """Evaluates a model on several splits with the meters of the config.

    Args:
        loaders: this rank's batches by the name of their split. They can be iterated any number of times.
        settings: the config's `train`. In the names of its meters {} stands for the split: acc/{}_top1.
        forward: as in `evaluate`.

    Attributes:
        names: names of the results.
        lower_is_better: whether a lower value of `settings.metric` is better, as its meter says.

    Raises:
        ConfigError: if `settings.metric`, by which the best checkpoint is chosen, is not one of the results.
    """

    def __init__(
        self,
        loaders: Mapping[str, Iterable[Any]],
        settings: DictConfig,
        transport: Transport,
        device: torch.device,
        forward: Callable[[nn.Module, Any], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.transport = transport
        self.device = device
        self.settings = settings
        self.loaders = loaders
        self.forward = forward
        meters = {name: meter for split in loaders for name, meter in self.make_meters(split).items()}
        self.names = list(meters)
        if settings.metric is not None and settings.metric not in meters:
            raise ConfigError(
                f"train.metric {settings.metric!r} is not a result; there are: {', '.join(self.names) or 'none'}"
            )
        self.lower_is_better = bool(getattr(meters.get(settings.metric), "lower_is_better", False))

    def make_meters(self, split: str) -> dict[str, Meter]:
        """New meters of one split, by result name."""
        patterns = self.settings.meters or {}
        made = {name: of_kind(Meter, node, instantiate(node)) for name, node in patterns.items()}
        return {pattern.replace("{}", split): meter for pattern, meter in made.items()}

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Returns results by name, equal on every rank. Collective."""
        return evaluate(model, self.loaders, self.make_meters, self.transport, self.device, self.forward)
