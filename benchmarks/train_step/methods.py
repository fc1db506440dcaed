"""The methods of `benchmarks.train_step`: each wraps a model and its optimizer."""

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.exchange.methods import GOSSIP, HOROVOD, METHODS
from benchmarks.train_step.models import Work
from dgc.comm import Transport
from dgc.comm.meter import TrafficMeter
from dgc.optim import DGCSGD, DistributedOptimizer, LocalOptimizer

LR, MOMENTUM = 1e-4, 0.9
AT_DDP = "@ddp"
PLAIN_DDP = ("ddp-noop", "ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd")
OVER_DDP = (*PLAIN_DDP, *(f"{name}{AT_DDP}" for name in METHODS if name != "noop"))
NAMES = (*METHODS, *GOSSIP, *HOROVOD, *OVER_DDP)
OPPONENTS = ("ddp-fp16", "ddp-bf16", "horovod-fp16", "fp16")


class Optimizer(Protocol):
    """The part of torch.optim.Optimizer that a step uses. Wrapped optimizers have it too."""

    def zero_grad(self) -> None: ...

    def step(self) -> Any: ...


class Method:
    """One method with a model of its own.

    Attributes:
        meter: Its "step" phase is the update of the parameters, or with Horovod's optimizer all of `step()`.
        finish: Waits for what `optimizer.step()` has only begun.
    """

    def __init__(
        self,
        work: Work,
        module: nn.Module,
        optimizer: Optimizer,
        meter: TrafficMeter,
        *,
        counts_step: bool,
        finish: Callable[[], None] | None = None,
    ):
        self.work, self.module, self.optimizer, self.meter = work, module, optimizer, meter
        self.finish, self._counts_step = finish, counts_step

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.work.loss(self.module).backward()
        start = perf_counter()
        self.optimizer.step()
        if self._counts_step:
            self.meter.seconds["step"] += perf_counter() - start
        if self.finish is not None:
            self.finish()


def make(name: str, work: Work, ratio: float, transport: Transport) -> Method:
    """A method by its name."""
    if name in OVER_DDP:
        return _ddp(name, work, ratio, transport)
    named = list(work.model.named_parameters())
    parameters = [p for _, p in named]
    sgd = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)
    if name in METHODS:
        dgcsgd = DGCSGD(parameters, lr=LR, momentum=MOMENTUM)
        ours = DistributedOptimizer(dgcsgd, named, METHODS[name](ratio), transport=transport)
        return Method(work, work.model, ours, ours.meter, counts_step=False)
    if name in GOSSIP:
        gossip = LocalOptimizer(sgd, named, GOSSIP[name](), transport=transport)
        # the next zero_grad would wait otherwise, during the turn of another method
        finish = gossip.synchronize_messages
        return Method(work, work.model, gossip, gossip.meter, counts_step=False, finish=finish)
    import horovod.torch as hvd

    compression = hvd.Compression.fp16 if name.endswith("fp16") else hvd.Compression.none
    prefixed = [(f"{name}.{of}", p) for of, p in named]
    of_horovod = hvd.DistributedOptimizer(sgd, named_parameters=prefixed, compression=compression)
    return Method(work, work.model, of_horovod, TrafficMeter(transport.local_size), counts_step=True)


def _ddp(name: str, work: Work, ratio: float, transport: Transport) -> Method:
    from dgc.ddp import compress

    model = DistributedDataParallel(work.model)
    parameters = list(work.model.parameters())
    if name.endswith(AT_DDP):
        dgcsgd = DGCSGD(parameters, lr=LR, momentum=MOMENTUM)
        exchange = compress(model, METHODS[name.removesuffix(AT_DDP)](ratio), dgcsgd, transport=transport)
        return Method(work, model, dgcsgd, exchange.meter, counts_step=True)
    register = TORCH_HOOKS[name]
    register(model)
    sgd = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)
    return Method(work, model, sgd, TrafficMeter(transport.local_size), counts_step=True)


def _noop_hook(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _noop(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, _noop_hook)


def _bf16_hook(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # under its own name, DDP refuses torch's hook without NCCL; Gloo adds bf16 as well
    return default_hooks.bf16_compress_hook(state, bucket)


def _fp16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _bf16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, _bf16_hook)


def _powersgd(model: DistributedDataParallel) -> None:
    from benchmarks.ddp_step import TorchPowerSGD

    TorchPowerSGD(2, model)


TORCH_HOOKS: dict[str, Callable[[DistributedDataParallel], object]] = {
    "ddp-noop": _noop,
    "ddp": lambda model: None,
    "ddp-fp16": _fp16,
    "ddp-bf16": _bf16,
    "ddp-powersgd": _powersgd,
}
