"""Recorded DGC training steps, for benchmarks with results that depend on realistic gradients.

`Learner` trains a model on one rank: momentum correction, accumulation, exact selection of the largest elements of
every tensor of two or more dimensions, masking; plain SGD for all other tensors. `record` stores the state of such
a training that a selection benchmark needs. `Gradients` generates any number of gradients like the recorded ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dgc.kernels as kernels
import dgc_models
from benchmarks import step_overhead
from dgc.core.bucket import Bucket, Segment
from dgc.kernels import PassInputs, SparseVector
from dgc.sparse.selectors import quota_of
from dgc_datasets import Digits

MOMENTUM = 0.9
EDGE = 32

Batches = Iterator[tuple[Tensor, Tensor]]


def endless(data: Dataset[Any], size: int) -> Batches:
    """Batches of (images, labels), shuffled again in each epoch."""
    loader = DataLoader(data, size, shuffle=True, drop_last=True)
    while True:
        yield from loader


def small_images() -> Dataset[Any]:
    """Return 32x32 training images with 3 channels in 10 classes: enlarged digits."""
    digits: Any = Digits()["train"]
    images, labels = digits.tensors
    larger = nn.functional.interpolate(images, size=(EDGE, EDGE), mode="bilinear").expand(-1, 3, -1, -1)
    return TensorDataset(larger, labels)


class Learner:
    """A model and its u and v by bucket. `gradients` are the gradients of the last step, by bucket."""

    def __init__(self, model: nn.Module, batches: Batches, density: float, lr: float):
        self.model, self.batches, self.lr = model, batches, lr
        self.parameters = dict(model.named_parameters())
        matrices = {name: p for name, p in self.parameters.items() if p.dim() > 1}
        layout = step_overhead.plan_buckets(matrices)
        self.buckets = [Bucket("bucket", segments, torch.float32, torch.device("cpu")) for segments in layout]
        self.quotas = [quota_of(segments, density) for segments in layout]
        self.u, self.v = ([torch.zeros(b.numel) for b in self.buckets] for _ in range(2))
        self.gradients: list[tuple[Tensor, ...]] = []
        self.dense = torch.optim.SGD([p for p in self.parameters.values() if p.dim() <= 1], lr, MOMENTUM)

    def differentiate(self) -> float:
        """Run forward and backward on the next batch. Returns the loss."""
        images, labels = next(self.batches)
        self.model.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.gradients = [
            tuple(g.reshape(-1) for s in bucket.segments if (g := self.parameters[s.name].grad) is not None)
            for bucket in self.buckets
        ]
        return float(loss.detach())

    def update(self) -> list[SparseVector]:
        """Do a DGC step with these gradients. Returns the sent elements of each bucket."""
        self.dense.step()
        sent = []
        for bucket, quota, g, u, v in zip(self.buckets, self.quotas, self.gradients, self.u, self.v, strict=True):
            kernel = kernels.of(v).selection
            inputs = PassInputs(g, u, v, MOMENTUM)
            selection = kernel.accumulate_and_select_(inputs, quota.per_tensor, None).elements
            kernel.remove_sent_(selection, u, v)
            count = int(selection.count)
            bucket.flat.zero_()[selection.indices[:count].long()] = selection.values[:count]
            for segment in bucket.segments:
                parameter = self.parameters[segment.name]
                parameter.data.sub_(segment.of(bucket.flat), alpha=self.lr)
            sent.append(selection)
        return sent


@dataclass
class Recording:
    """By bucket: u and v before the last step, its gradient, and v after it; mean and standard deviation of every
    element's gradient over the second half of the steps.
    """

    model: str
    segments: list[tuple[Segment, ...]]
    u: list[Tensor]
    v: list[Tensor]
    gradient: list[Tensor]
    accumulated: list[Tensor]
    mean: list[Tensor]
    deviation: list[Tensor]
    loss: float

    @property
    def sizes(self) -> list[list[int]]:
        return [[s.numel for s in segments] for segments in self.segments]


def record(name: str, data: Dataset[Any], batch: int, density: float, steps: int, lr: float) -> Recording:
    """Record the last of `steps` steps, with a fixed seed."""
    torch.manual_seed(0)
    learner = Learner(getattr(dgc_models, name)(), endless(data, batch), density, lr)
    total, square = ([torch.zeros_like(v) for v in learner.v] for _ in range(2))
    losses, first = [], steps // 2
    for step in range(steps):
        losses.append(learner.differentiate())
        if step >= first:
            for t, s, g in zip(total, square, learner.gradients, strict=True):
                flat = torch.cat(g)
                t += flat
                s.addcmul_(flat, flat)
        if step < steps - 1:
            learner.update()
    count = steps - first
    means = [t.div_(count) for t in total]
    for s, m in zip(square, means, strict=True):
        s.div_(count).addcmul_(m, m, value=-1).clamp_(min=0).sqrt_()
    gradient, (u, v) = [torch.cat(g) for g in learner.gradients], (learner.u, learner.v)
    sums = [b + (MOMENTUM * a + g) for a, b, g in zip(u, v, gradient, strict=True)]
    layout = [bucket.segments for bucket in learner.buckets]
    return Recording(name, layout, u, v, gradient, sums, means, square, mean(losses[first:]))


class Gradients(step_overhead.Gradients):
    """Independent normal elements with recorded means and deviations. A gradient is valid until the next one."""

    def __init__(self, recording: Recording):
        super().__init__(recording.segments, "cpu")
        self.recording = recording
        # heavy tails come from the elements' deviations
        self.pool.normal_(generator=torch.Generator().manual_seed(1))
        self.buffers = [torch.empty_like(g) for g in recording.gradient]

    def next(self) -> list[Tensor]:
        rows = zip(self.recording.mean, self.recording.deviation, super().next(), self.buffers, strict=True)
        return [torch.addcmul(mean, deviation, noise, out=out) for mean, deviation, noise, out in rows]
