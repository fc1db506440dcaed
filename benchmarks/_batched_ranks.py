"""Simulated ranks whose forward and backward passes are one batch, and which share one optimizer where they can.

`train.py` with the same words and simulated ranks has the same losses, up to rounding, and the same bytes. On a
GPU it is limited by the number of its operations, each of which takes the host some microseconds.

- Forward and backward: `torch.vmap` over the ranks, each with its own rows, its own loss and its own gradients.
  Every matrix product is one of all ranks.
- Gradients that are compressed: the ranks' models are equal after each step, so one model and one optimizer are
  enough. The compressors of all ranks talk in lockstep, in this thread.
- Models that are exchanged: each rank has its own, and its own `LocalOptimizer`.
- Muon: the matrices of one shape, of all layers and ranks, are iterated as one batch.

It keeps no checkpoints.
"""

import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

from dgc.comm.lockstep import LockstepTransport, LockstepWorld
from dgc.comm.meter import TrafficMeter
from dgc.engine.exchange import ExchangeSettings, GradientPlan, plan_gradients
from dgc.gossip.model import FlatModel
from dgc.optim import MuonWithAdamW
from dgc.optim.muon import NS, newton_schulz
from dgc.optim.muon import _scale as scale_of
from dgc.optim.muon_rule import rows_of
from dgc_training.data import PassSampler
from dgc_training.random_state import seed_everything
from dgc_training.schedule import Schedule, scale_learning_rate
from dgc_training.startup.build import build, build_as, build_method, parameter_groups, wrap_optimizer
from dgc_training.stepping import AUTOCAST
from dgc_training.tasks.tokens import IGNORED, EvaluationRows

NO_RULE = "There is a performance drop because we have not yet implemented the batching rule"  # of CPUs' attention


def batches(tree: DictConfig, tokens: Tensor, ranks: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of each step of an epoch, int64 [ranks, rows, context], as in train.py."""
    rows, context = tree.train.batch_size, tree.task.context
    windows = (len(tokens) - 1) // context
    orders = []
    for rank in range(ranks):
        sampler = PassSampler(windows, rows, 1, rank=rank, size=ranks, seed=tree.seed)
        sampler.epoch = epoch
        orders.append(torch.tensor(sampler.indices()[: tree.task.steps_per_epoch * rows], dtype=torch.int64))
    starts = context * torch.stack(orders).view(ranks, -1, rows).transpose(0, 1)
    within = torch.arange(context + 1, device=tokens.device)
    for first in starts.to(tokens.device):
        found = tokens[first[..., None] + within].long()
        yield found[..., :-1], found[..., 1:]


class FromVector:
    """Calls a model with parameters that are parts of one vector, without the lookups of `functional_call`."""

    def __init__(self, model: nn.Module):
        self._model = model
        owners = [(module, name) for module in model.modules() for name in module._parameters]
        by_id = {id(module._parameters[name]): (module._parameters, name) for module, name in owners}
        parameters = list(model.parameters())
        if len(owners) != len(parameters) or any(not p.is_contiguous() for p in parameters):
            raise ValueError("modules share parameters, or one is not contiguous: these ranks cannot be batched")
        self._places = [by_id[id(p)] for p in parameters]
        self._own = parameters
        self.sizes, self._shapes = [p.numel() for p in parameters], [p.shape for p in parameters]

    def __call__(self, vector: Tensor, tokens: Tensor) -> Tensor:
        parts = vector.split(self.sizes)
        for (owner, name), part, shape in zip(self._places, parts, self._shapes, strict=True):
            owner[name] = part.view(shape)  # no nn.Parameter
        try:
            logits: Tensor = self._model(tokens)
        finally:
            for (owner, name), p in zip(self._places, self._own, strict=True):
                owner[name] = p
        return logits


def evaluate(call: FromVector, vector: Tensor, rows: EvaluationRows) -> float:
    """Bits per token of a test stream, in fp32."""
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in rows:
            logits = call(vector, batch.inputs).flatten(0, 1)
            total += cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED, reduction="sum").item()
            count += int((batch.targets != IGNORED).sum())
    return total / count / math.log(2)


def nothing(*_: object) -> None:
    """In place of the step of an optimizer whose step was taken, and whose gradients are replaced."""


class JointMuon:
    """Takes the steps of the `MuonWithAdamW` of one rank or of all ranks, at the rates of the first one.

    It keeps the momenta and moments itself. The others keep the settings alone.
    """

    def __init__(self, optimizers: Sequence[MuonWithAdamW]):
        self._muon, self._followed, adamw = [], [], []
        for groups in zip(*(optimizer.param_groups for optimizer in optimizers), strict=True):
            group, params = groups[0], [p for each in groups for p in each["params"]]
            if group["muon"]:
                self._muon.append((group, params, [torch.zeros_like(p) for p in params], places(params, group)))
            else:
                self._followed.append(group)
                adamw.append({**group, "params": params})
        self._adamw = AdamW(adamw)

    @torch.no_grad()
    def step(self) -> None:
        for own, group in zip(self._adamw.param_groups, self._followed, strict=True):
            own["lr"] = group["lr"]
        self._adamw.step()
        for group, params, momenta, by_shape in self._muon:
            lr, mu, gradients = float(group["lr"]), group["momentum"], [p.grad for p in params]
            torch._foreach_lerp_(momenta, gradients, 1 - mu)
            whole = torch._foreach_lerp(gradients, momenta, mu) if group["nesterov"] else momenta
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            for shape, (matrices, slices) in by_shape.items():
                u = torch.stack([whole[i] if at is None else whole[i][at] for i, at in slices])
                steps = newton_schulz(u.to(NS[group["ns_precision"]]), group).float() * scale_of(shape, group)
                torch._foreach_add_(matrices, list(steps.unbind()), alpha=-lr)


Places = dict[torch.Size, tuple[list[Tensor], list[tuple[int, slice | None]]]]


def places(params: Sequence[Tensor], group: Mapping[str, Any]) -> Places:
    """By shape, the matrices in parameters, and where each is: a number of a parameter and its rows. None: all."""
    found: Places = {}
    for i, p in enumerate(params):
        sizes, first = rows_of(p.shape, group["parts"]), 0
        for size in sizes:
            matrix = p.detach()[first : first + size]
            matrices, slices = found.setdefault(matrix.shape, ([], []))
            matrices.append(matrix)
            slices.append((i, None if len(sizes) == 1 else slice(first, first + size)))
            first += size
    return found


class Ranks(ABC):
    """Models and optimizers of simulated ranks.

    Attributes:
        optimizers: Those whose rates a schedule sets.
    """

    optimizers: list[Any]

    def __init__(self, settings: DictConfig, model: nn.Module, ranks: int):
        # not strict: `run` is called for each step, and the communicators of the one before are closed then
        self.world, self.size, self.clip_norm = LockstepWorld(ranks, strict=False), ranks, settings.clip_norm
        self.call = FromVector(model)

    def optimizer_of(self, model: nn.Module, settings: DictConfig) -> Optimizer:
        groups = parameter_groups(model, settings.optimize_bn_separately, settings.parameter_groups)
        optimizer: Optimizer = build_as(Optimizer, settings.optimizer, groups)
        return optimizer

    def clip(self, optimizer: Any, parameters: Sequence[Tensor]) -> None:
        if self.clip_norm is not None and not getattr(optimizer, "receives_momentum", False):
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)

    @abstractmethod
    def models(self) -> Tensor:
        """The models [ranks, n]."""

    @abstractmethod
    def step(self, gradients: Tensor) -> None:
        """Take a step of all ranks with their gradients [ranks, n]."""

    @abstractmethod
    def begin_epoch(self, epoch: int) -> None: ...

    @abstractmethod
    def meter(self) -> TrafficMeter:
        """The meter of rank 0."""


class Replicas(Ranks):
    """One model for all ranks, whose gradients are compressed."""

    def __init__(self, settings: DictConfig, model: nn.Module, ranks: int):
        super().__init__(settings, model, ranks)
        named = list(model.named_parameters())
        self.parameters, self.flat = [p for _, p in named], FlatModel(named)
        self.optimizer = self.optimizer_of(model, settings)
        self.optimizers = [self.optimizer]
        joint = JointMuon([self.optimizer]) if isinstance(self.optimizer, MuonWithAdamW) else None
        self.take = self.optimizer.step if joint is None else joint.step

        def plan(transport: LockstepTransport) -> GradientPlan:
            exchange = ExchangeSettings(build_method(settings), bucket_mb=settings.bucket_mb)
            return plan_gradients(exchange, named, transport, self.optimizer)

        self.plans = self.world.run(plan)
        self.views = []
        for each in self.plans:
            views = {s.name: s.of(of.bucket.flat) for of in each.buckets for s in of.bucket.segments}
            self.views.append([views[name] for name, _ in named])

    def models(self) -> Tensor:
        return self.flat.z.expand(self.size, -1)

    @torch.no_grad()
    def step(self, gradients: Tensor) -> None:
        for views, own in zip(self.views, gradients, strict=True):
            parts = zip(own.split(self.call.sizes), views, strict=True)
            torch._foreach_copy_(views, [part.view_as(view) for part, view in parts])
        for same in zip(*(plan.buckets for plan in self.plans), strict=True):
            bucket = same[0].bucket
            self.meter().count_dense(bucket.numel, self.size)
            result = self.world.converse(bucket.name, [of.states.reduce(of.bucket) for of in same])[0]
            if result.nonfinite is not None:
                raise FloatingPointError(result.nonfinite)
            result.write_to(bucket)
        for p, view in zip(self.parameters, self.views[0], strict=True):
            p.grad = view
        self.clip(self.optimizer, self.parameters)
        self.take()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler would warn

    def begin_epoch(self, epoch: int) -> None:
        for plan in self.plans:
            for states in plan.states:
                states.begin_epoch(epoch)

    def meter(self) -> TrafficMeter:
        return self.world.meters[0]


class Islands(Ranks):
    """A model and an optimizer for each rank. They exchange models."""

    def __init__(self, settings: DictConfig, model: nn.Module, ranks: int):
        super().__init__(settings, model, ranks)
        own = [deepcopy(model) for _ in range(ranks)]

        def wrap(transport: LockstepTransport) -> Any:
            mine = own[transport.rank]
            optimizer = wrap_optimizer(self.optimizer_of(mine, settings), mine, settings, transport)
            optimizer.zero_grad()
            return optimizer

        self.optimizers = self.world.run(wrap)
        self.parameters = [list(each.parameters()) for each in own]
        inner = [optimizer.inner for optimizer in self.optimizers]
        self.joint, self.begins = None, True
        if isinstance(inner[0], MuonWithAdamW):
            if settings.local.average_momentum:
                raise ValueError("the momenta of batched ranks are not exchanged: leave average_momentum out")
            self.joint = JointMuon(inner)
            for each in inner:
                each.step = each.zero_grad = nothing

    def models(self) -> Tensor:
        n = sum(self.call.sizes)  # momenta may follow
        return torch.stack([optimizer.model.z[:n] for optimizer in self.optimizers])

    def step(self, gradients: Tensor) -> None:
        if self.clip_norm is not None:  # as clip_grad_norm_ of each rank
            norms = gradients.norm(dim=1, keepdim=True)
            gradients.mul_((self.clip_norm / (norms + 1e-6)).clamp_(max=1.0))
        for parameters, own in zip(self.parameters, gradients, strict=True):
            for p, part in zip(parameters, own.split(self.call.sizes), strict=True):
                p.grad = part.view(p.shape)

        if self.joint is not None:
            self.joint.step()

        begins, self.begins = self.begins, False

        def take(transport: LockstepTransport) -> None:
            optimizer = self.optimizers[transport.rank]
            if begins or self.joint is None:
                optimizer.step()
                optimizer.zero_grad()
            else:  # without the checks of every parameter
                optimizer.meter.count_dense(optimizer.model.numel, self.size)
                optimizer.method.update(nothing, float(optimizer.param_groups[0]["lr"]))
                optimizer.method.begin_step()

        self.world.run(take)

    def begin_epoch(self, epoch: int) -> None:
        for optimizer in self.optimizers:
            optimizer.begin_epoch(epoch)

    def meter(self) -> TrafficMeter:
        found: TrafficMeter = self.optimizers[0].meter
        return found


class BatchedRun:
    """A run of the config `tree` with simulated ranks on a device.

    Example:
        run = BatchedRun(tree, 4, torch.device("cuda"))
        curve = run.train()
    """

    def __init__(self, tree: DictConfig, ranks: int, device: torch.device):
        settings = tree.train
        self.tree, self.size, self.device = tree, ranks, device
        seed_everything(tree.seed)
        self.dataset = build(tree.dataset)
        self.tokens = self.dataset["train"].to(device)
        test, task = self.dataset["test"], tree.task
        self.test = EvaluationRows(test, task.context, task.evaluation_rows, rank=0, size=1, device=device)
        model: nn.Module = build_as(nn.Module, tree.model).to(device)
        kind = Islands if settings.local or settings.gossip else Replicas
        self.ranks: Ranks = kind(settings, model, ranks)
        self.schedules = []
        for optimizer in self.ranks.optimizers:
            scale_learning_rate(optimizer, ranks)
            self.schedules.append(
                Schedule(
                    optimizer,
                    lambda scaled: build(settings.scheduler, scaled),
                    size=ranks,
                    steps_per_epoch=tree.task.steps_per_epoch,
                    warmup_epochs=settings.warmup_lr_epochs,
                    per_epoch=settings.schedule_lr_per_epoch,
                )
            )

    def losses(self, models: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each rank [ranks], of models [ranks, n] and int64 [ranks, rows, context]."""
        dtype = AUTOCAST[self.tree.train.precision]

        def loss(model: Tensor, x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(self.ranks.call(model, x).flatten(0, 1).float(), y.flatten())

        with torch.autocast(self.device.type, dtype, enabled=dtype is not None), warnings.catch_warnings():
            warnings.filterwarnings("ignore", NO_RULE)
            found: Tensor = torch.vmap(loss)(models, inputs, targets)
        return found

    def step(self, epoch: int, number: int, inputs: Tensor, targets: Tensor) -> Tensor:
        """Take a step of all ranks, and return their mean loss."""
        for schedule in self.schedules:
            schedule.begin_step(epoch, number)
        models = self.ranks.models().requires_grad_()
        losses = self.losses(models, inputs, targets)
        (gradients,) = torch.autograd.grad(losses.sum(), models)
        self.ranks.step(gradients)
        return losses.detach().mean()

    def train(self) -> tuple[list[dict[str, Any]], float]:
        """Return what is known after each epoch, and the seconds of all steps, without evaluation.

        Raises FloatingPointError if a loss is not finite.
        """
        curve, seconds, steps = [], 0.0, self.tree.task.steps_per_epoch
        for epoch in range(self.tree.train.num_epochs):
            self.ranks.begin_epoch(epoch)
            start, total = time.perf_counter(), torch.zeros((), device=self.device)
            for number, batch in enumerate(batches(self.tree, self.tokens, self.size, epoch)):
                total += self.step(epoch, number, *batch)
            mean = total.item() / steps  # waits for the device
            seconds += time.perf_counter() - start
            if not math.isfinite(mean):
                raise FloatingPointError(f"the loss of epoch {epoch} is {mean}")
            mean_model, meter = self.ranks.models().mean(0), self.ranks.meter()
            sent = {"wire_bytes": round(meter.wire_bytes), "payload_bytes": meter.payload_bytes}
            sent["dense_wire_bytes"] = round(meter.dense_wire_bytes)
            bits = evaluate(self.ranks.call, mean_model, self.test)
            curve.append({"step": (epoch + 1) * steps, "bits": bits, **sent})
        return curve, seconds
