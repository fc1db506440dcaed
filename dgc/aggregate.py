"""PowerSGD for training loops without a DistributedOptimizer, with the interface of epfml/powersgd: Aggregator,
AllReduce, Config, PowerSGD, optimizer_step.

    powersgd = PowerSGD(params, config=Config(rank=1, min_compression_rate=10, num_iters_per_step=2))
    loss.backward()
    optimizer_step(optimizer, powersgd)

All ranks must begin with the same parameters.

Differences from the original: The error is kept inside PowerSGD, where zero_grad and clipping do not affect it,
and is saved by state_dict. The original leaves it in the gradients, which are set to zero here. A gradient that is
None counts as zero. NaN or inf raises an error on every rank.

At rank 1 the original divides the factors of all matrices of one shape by their common norm, where the paper
orthonormalizes each matrix. Of gradients of exactly rank 1 in 8 equal layers, two half steps then send 13 to 37 %
in the first step, depending on the first factors; here they send 100 %. Config(orthogonalization="authors")
repeats the original.

The original decides whether to compress a tensor from its own shape: for [64, 64, 3, 3] at rank 4 it counts
min(4, 3) (64 + 64 + 3 + 3) = 402 numbers. Here the matrix [64, 576] decides, by the 4 (64 + 576) = 2560 numbers
that are sent.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.comm.connect import default_transport
from dgc.comm.meter import TrafficMeter
from dgc.comm.transport import Transport
from dgc.core.bucket import check_real
from dgc.core.dense import DenseCompressor
from dgc.core.protocol import Compressor
from dgc.core.results import NonFiniteGradientError
from dgc.engine.exchange import ExchangeSettings, GradientExchange, plan_gradients
from dgc.engine.options import check_has_values
from dgc.engine.steps import AwaitedStep
from dgc.lowrank.powersgd import PowerSGDCompressor


@dataclass(frozen=True)
class Config:
    """Arguments of `PowerSGDCompressor`, with the original's defaults. orthogonalization: see above."""

    rank: int
    min_compression_rate: float = 2
    num_iters_per_step: int = 1
    start_compressing_after_num_steps: int = 100
    orthogonalization: str = "auto"


class Aggregator(ABC):
    """Base class for `optimizer_step`: averages gradients over all ranks. Subclass it for other methods."""

    @abstractmethod
    def aggregate(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the averages over all ranks in new tensors, and set the gradients to zero. None counts as zero.

        Raises:
            NonFiniteGradientError: A gradient has NaN or inf on any rank. Raised on every rank.
        """

    def check_parameters(self, params: Sequence[Tensor]) -> None:
        """Raise ValueError if this aggregator does not accept the gradients of `params` in this order."""
        return None


class AllReduce(Aggregator):
    """Exact averages without compression, as a baseline. None of the first gradients may be None."""

    def __init__(self, transport: Transport | None = None):
        self._transport = transport
        self._exchange: ListExchange | None = None

    def aggregate(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        if self._exchange is None:
            like = [g for g in gradients if g is not None]
            if len(like) < len(gradients):
                raise ValueError(
                    "AllReduce takes the shapes from the first gradients, so none of them may be None: pass zeros"
                )
            self._exchange = ListExchange(like, DenseCompressor(), self._transport or default_transport())
        return self._exchange.average(gradients)


class PowerSGD(Aggregator):
    """PowerSGD as an aggregator of gradients (Vogels et al. 2019, arXiv 1905.13727). See `PowerSGDCompressor`.

    Args:
        params: Parameters, in the order of the gradients.
        config: Rank and other settings.
        transport: Connects the ranks. None: see `dgc.init`.

    Attributes:
        step_counter: Number of steps, including uncompressed ones and excluding dropped ones.
        dropped_steps: Number of steps that NonFiniteGradientError has ended.

    Raises:
        ValueError: `params` is empty.
    """

    def __init__(self, params: Iterable[Tensor], config: Config, transport: Transport | None = None):
        self.params = list(params)
        if not self.params:
            raise ValueError("PowerSGD needs parameters")
        self.compressor = PowerSGDCompressor(**asdict(config))
        self._exchange = ListExchange(self.params, self.compressor, transport or default_transport())
        self.transport, self.meter = self._exchange.transport, self._exchange.meter

    def aggregate(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """After NonFiniteGradientError the errors are as if NaN and inf had been 0 and nothing had been sent."""
        return self._exchange.average(gradients)

    def check_parameters(self, params: Sequence[Tensor]) -> None:
        if [*map(id, params)] != [*map(id, self.params)]:
            raise ValueError("PowerSGD was built with other parameters than the optimizer, or in another order")

    @property
    def step_counter(self) -> int:
        return max(plan.states[plan.bucket].steps for plan in self._exchange.planned)

    @property
    def dropped_steps(self) -> int:
        return self._exchange.dropped_steps

    @property
    def uncompressed_num_floats(self) -> int:
        """Number of elements of all parameters."""
        return sum(p.numel() for p in self.params)

    @property
    def compressed_num_floats(self) -> float:
        """Numbers sent by a rank per compressed step, averaged over two steps, including vectors."""
        return sum(self.compressor.floats_per_step(plan.bucket) for plan in self._exchange.planned)

    @property
    def compression_rate(self) -> float:
        return self.uncompressed_num_floats / max(1, self.compressed_num_floats)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state. It differs between ranks: save it on each.

        Raises:
            RuntimeError: The optimizer has not taken its step on the last averages, or an exchange is incomplete.
        """
        return self._exchange.compression_state_dict()

    def load_state_dict(self, state: dict[str, Any], *, allow_other_rank: bool = False) -> None:
        """Load this rank's state, as `DistributedOptimizer.load_compression_state_dict`. Call it on every rank."""
        self._exchange.load_compression_state_dict(state, allow_other_rank=allow_other_rank)


def optimizer_step(optimizer: Optimizer, aggregator: Aggregator) -> None:
    """Average the gradients of the optimizer's parameters, and take a step with the averages."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    aggregator.check_parameters(params)
    own = [p.grad for p in params]
    gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(params, own, strict=True)]
    for p, average in zip(params, aggregator.aggregate(gradients), strict=True):
        p.grad = average if p.requires_grad else None  # momentum and weight decay must not change a frozen one
    optimizer.step()
    for p, gradient in zip(params, own, strict=True):
        p.grad = gradient


class ListExchange(GradientExchange):
    """Averages lists of gradients with one compressor. Construction is collective.

    like: Tensors with the shapes of the gradients, in their order; parameters, if an optimizer steps on the means.
    """

    def __init__(self, like: Sequence[Tensor], compressor: Compressor, transport: Transport):
        named = [(f"param{i}", tensor) for i, tensor in enumerate(like)]
        check_has_values(named)
        self._kinds = [(tensor.shape, tensor.dtype) for tensor in like]
        self._numbers = {name: i for i, (name, _) in enumerate(named)}
        for name, tensor in named:
            check_real(name, tensor.dtype)
        settings = ExchangeSettings(compressor, nonfinite="raise", bucket_mb=inf)
        settings.check_equal(transport)
        # the last gradient is the first of a bucket otherwise
        super().__init__(settings, plan_gradients(settings, named[::-1], transport), transport, TrafficMeter())
        self._awaited_step = AwaitedStep(like)

    def _is_running(self) -> bool:
        return False  # `average` ends what it has begun

    @torch.no_grad()
    def average(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the means in new tensors, and set the gradients to zero. None counts as zero.

        Raises:
            ValueError: The number or a shape of the gradients is another one.
            NonFiniteGradientError: A gradient has NaN or inf on any rank. Raised on every rank.
        """
        if len(gradients) != len(self._kinds):
            raise ValueError(f"{len(gradients)} gradients for {len(self._kinds)} parameters")
        for i, (g, (shape, dtype)) in enumerate(zip(gradients, self._kinds, strict=True)):
            if g is not None and g.shape != shape:
                raise ValueError(f"gradient {i} has shape {tuple(g.shape)}, not {tuple(shape)}")
            if g is not None and g.dtype != dtype:
                raise ValueError(
                    f"gradient {i} is {g.dtype}, and was planned as {dtype}: convert the model before "
                    "the aggregator is built, or build it anew"
                )
        views: dict[int, Tensor] = {}
        with self._engine.intact:
            for plan in self.planned:
                for segment in plan.bucket.segments:
                    i = self._numbers[segment.name]
                    g, views[i] = gradients[i], segment.of(plan.bucket.flat)
                    views[i].zero_() if g is None else views[i].copy_(g.to_dense() if g.is_sparse else g)
            outcome = self._finish_step(learn=False)
        for g in gradients:
            if g is not None:
                g.zero_()
        if outcome.nonfinite is not None:
            self._drops.drop(outcome.nonfinite)
            raise NonFiniteGradientError(outcome.nonfinite)
        for plan, result in outcome.results:
            result.write_to(plan.bucket)
        return [views[i].clone() for i in range(len(gradients))]
