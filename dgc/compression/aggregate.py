"""PowerSGD in three lines, for training loops without a DistributedOptimizer; the names of epfml/powersgd.

    powersgd = PowerSGD(params, config=Config(rank=1, min_compression_rate=10, num_iters_per_step=2))
    loss.backward()
    optimizer_step(optimizer, powersgd)

Ranks must begin with the same parameters.

Differences from the original: the error is kept inside, where neither zero_grad nor clipping reaches it, and saved
by state_dict; gradients come back as zeros, where the original leaves the error in them, so that training is the
same with zero_grad and without. A gradient that is None counts as zero. NaN or inf raises an error on every rank.
`Config` has the original's defaults.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.bucket import make_bucket
from dgc.comm.conversation import Talk
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.meter import Meter
from dgc.comm.transport import Transport
from dgc.compression.powersgd import PowerSGDCompressor
from dgc.compression.protocol import NonFiniteGradientError

_built: WeakKeyDictionary[Transport, int] = WeakKeyDictionary()  # how many on a transport: all ranks count alike


@dataclass(frozen=True)
class Config:
    """As PowerSGDCompressor, mode "residual"."""

    rank: int
    min_compression_rate: float = 2
    num_iters_per_step: int = 1
    start_compressing_after_num_steps: int = 100


class PowerSGD:
    """params: in the order of the gradients to come. transport: who carries the messages; None is Horovod, or
    where that is not installed this process alone.
    """

    def __init__(self, params: Iterable[Tensor], config: Config, transport: Transport | None = None):
        self.params = list(params)
        if not self.params:
            raise ValueError("PowerSGD needs parameters")
        self.transport, self.meter = transport or _default_transport(), Meter()
        self.compressor = PowerSGDCompressor(**asdict(config))
        alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, p in enumerate(self.params):
            alike.setdefault((p.dtype, p.device), []).append(i)
        self._members = list(alike.values())
        _built[self.transport] = number = _built.get(self.transport, -1) + 1
        self._buckets = [
            make_bucket(f"powersgd{number}.{b}", [(f"param{i}", self.params[i]) for i in members])
            for b, members in enumerate(self._members)
        ]
        for bucket in self._buckets:
            self.compressor.plan(bucket, self.transport.size, self.transport.rank)

    @torch.no_grad()
    def aggregate(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The averages over all ranks, in new tensors; the gradients become zero.

        Raises NonFiniteGradientError, on every rank, for NaN or inf on any; the errors are as if such elements had
        been zero and nothing had been sent.
        """
        if len(gradients) != len(self.params):
            raise ValueError(f"{len(gradients)} gradients of {len(self.params)} parameters")
        talks = []
        for bucket, members in zip(self._buckets, self._members, strict=True):
            for segment, i in zip(bucket.segments, members, strict=True):
                g = gradients[i]
                view = segment.of(bucket.flat)
                view.zero_() if g is None else view.copy_(g)
            talks.append(Talk(bucket.name, self.compressor.reduce(bucket), self.transport, self.meter))
        reasons = [talk.finish().nonfinite for talk in talks]
        averages = list(self.params)
        for bucket, members in zip(self._buckets, self._members, strict=True):
            for segment, i in zip(bucket.segments, members, strict=True):
                averages[i] = segment.of(bucket.flat).clone()
        for g in gradients:
            if g is not None:
                g.zero_()
        reason = next((reason for reason in reasons if reason), None)
        if reason is not None:
            for bucket in self._buckets:
                self.compressor.take_back(bucket)
            raise NonFiniteGradientError(reason)
        return averages

    @property
    def uncompressed_num_floats(self) -> int:
        """Numbers in all parameters."""
        return sum(p.numel() for p in self.params)

    @property
    def compressed_num_floats(self) -> float:
        """Numbers that a rank sends per step, on average over two, once it compresses; vectors included."""
        return sum(self.compressor.floats_per_step(bucket) for bucket in self._buckets)

    @property
    def compression_rate(self) -> float:
        return self.uncompressed_num_floats / max(1, self.compressed_num_floats)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state."""
        return self.compressor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.compressor.load_state_dict(state)


def optimizer_step(optimizer: Optimizer, powersgd: PowerSGD) -> None:
    """Average the gradients of the optimizer's parameters and step on the averages. ValueError where powersgd was
    built of others, or in another order.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if [*map(id, params)] != [*map(id, powersgd.params)]:
        raise ValueError("PowerSGD was built of other parameters than the optimizer's, or in another order")
    gradients = [p.grad for p in params]
    for p, average in zip(params, powersgd.aggregate(gradients), strict=True):
        p.grad = average
    optimizer.step()
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient


def _default_transport() -> Transport:
    try:
        from dgc.comm.horovod import connect
    except ImportError:
        return LockstepWorld(1).transports[0]
    return connect()
