"""The exchange of 1-bit Adam: gradients in a warm-up, then the optimizer's momentum.

It needs its optimizer, `dgc.optim.OneBitAdam`, which owns the moments and says which stage a step is in. T_w is
its `freeze_step`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

import dgc.kernels as kernels
from dgc.codes.chunked_signs import ChunkedSignsCompressor, ChunkState
from dgc.comm.requests import Conversation
from dgc.core.bucket import Bucket
from dgc.core.dense import for_gradients
from dgc.core.protocol import MomentumOwner, Position, Preconditioner, StatelessCompressor, Use, Vector
from dgc.core.results import Reduced
from dgc.core.state import zeros
from dgc.warn import warn

CHECKS = 200  # of the momentum of a bucket after the warm-up: on a GPU each one waits for the device
HEAD = 16  # elements of each tensor that are compared


@dataclass(eq=False, kw_only=True)
class MomentumState(ChunkState):
    """delivered: of the last step, the first momentum, its version, and the first elements of the next momenta."""

    delivered: tuple[Tensor, int, Tensor] | None = None


@dataclass
class Checks:
    """The checks of an optimizer's momentum that are left in a run."""

    left: int = CHECKS


class OneBitAdamCompressor(ChunkedSignsCompressor):
    """The exchange of 1-bit Adam: Adam's momentum in 1 bit per element (Tang, Gan, Awan, Rajbhandari, Li, Lian,
    Liu, Zhang, He 2021, arXiv 2102.02888, Algorithm 1).

    With Adam's momentum m, in step t = 1, 2, ..:

        t <= T_w     result = mean over the ranks of g_i, not compressed
        t > T_w      m_i = beta1 m + (1 - beta1) g_i           m: the same on every rank
                     result = signs of m_i, in two rounds      the next m

    Payload of a bucket: see `dgc.codes.chunked_signs`. Differences from the paper: the servers compress
    the sum and not the mean, and each piece of a tensor has its own scale. A step that is dropped because of
    NaN or inf leaves the errors of both directions as they were: its gradient is lost, as with uncompressed Adam.

    From step `freeze_step` on, .grad is the momentum and no longer the gradient: do not clip it. If it was
    clipped, as by trainers that clip by default (Hugging Face: max_grad_norm=1.0), rank 0 warns once.

    Args:
        gradients (StatelessCompressor, optional): exchanges the gradients of the warm-up; None sends them in their
            own dtype, `FP16Compressor()` in half the bytes.

    Raises:
        ValueError: if `gradients` keeps a state, or by `DistributedOptimizer` if its optimizer is no OneBitAdam.

    Example:
        >>> optimizer = OneBitAdam(model.parameters(), lr=1e-3, freeze_step=1000)
        >>> optimizer = DistributedOptimizer(optimizer, model.named_parameters(), OneBitAdamCompressor())
    """

    unsuited: Mapping[Use, str] = {}  # it exchanges momentum

    def __init__(self, gradients: StatelessCompressor | None = None) -> None:
        super().__init__()
        self._gradients = for_gradients(gradients)
        self._owner: MomentumOwner | None = None
        self._parameters: dict[str, Tensor] = {}
        self._checks = Checks(0)

    def bound_to(self, owner: MomentumOwner, parameters: Mapping[str, Tensor]) -> "OneBitAdamCompressor":
        """Return the compressor that takes momentum and stage from this optimizer."""
        if isinstance(owner, Preconditioner):
            raise ValueError(
                f"OneBitAdamCompressor exchanges momentum, and {type(owner).__name__} takes updates in its place: "
                "use dgc.optim.OneBitAdam"
            )
        return self.changed(_owner=owner, _parameters=dict(parameters), _checks=Checks())

    @property
    def compress_ratio(self) -> float:
        return super().compress_ratio if self._owner is None or self._owner.exchanges_momentum else 1.0

    def init(self, bucket: Bucket, size: int, rank: int) -> MomentumState:
        if self._owner is None:
            raise ValueError(
                "OneBitAdamCompressor exchanges the momentum of a dgc.optim.OneBitAdam, and has none: wrap that "
                "optimizer in DistributedOptimizer, or pass it to dgc.ddp.compress; without it, use "
                "TwoPhaseCompressor"
            )
        return MomentumState(**vars(super().init(bucket, size, rank)))

    def reduce(self, bucket: Bucket, state: Any) -> Conversation[Reduced]:
        assert self._owner is not None
        if not self._owner.exchanges_momentum:
            return (yield from self._gradients.reduce(bucket, state))
        reduced, delivered = (yield from super().reduce(bucket, state)), None
        if self._checks.left > 0 and state.rank == 0:
            ((_, m),) = self._owner.momentum_of([self._parameters[bucket.segments[0].name]])
            delivered = m, m._version, _heads([s.of(bucket.flat) for s in bucket.segments])
        new: MomentumState = reduced.state  # type: ignore[assignment]
        return Reduced(reduced.result, replace(new, delivered=delivered), replace(state.next(), delivered=None))

    def accumulate(self, bucket: Bucket, state: Any) -> tuple[Vector, Position]:
        """v = beta1 m + (1 - beta1) g + e, in a new tensor."""
        assert self._owner is not None
        v = zeros(bucket)
        first_nonfinite = kernels.of(v).selection.accumulate_(kernels.PassInputs(bucket.gradients, None, v))
        bucket.release()
        momenta = self._owner.momentum_of([self._parameters[s.name] for s in bucket.segments])
        self._check_unchanged(state, [m for _, m in momenta])
        for s, (beta1, m) in zip(bucket.segments, momenta, strict=True):
            s.of(v).lerp_(m.to(torch.float32), beta1)
        return v.add_(state.errors["errors"]), first_nonfinite

    def _check_unchanged(self, state: MomentumState, momenta: Sequence[Tensor]) -> None:
        """Warn if the optimizer did not get the momentum that the last exchange delivered."""
        if self._checks.left <= 0 or state.delivered is None:
            return
        first_momentum, version, delivered = state.delivered
        # it was loaded, or there was no step
        if first_momentum is not momenta[0] or first_momentum._version == version:
            return
        self._checks.left -= 1
        heads = _heads(momenta)
        expected = float((delivered * (heads != 0)).abs().sum())  # a masked element stays at zero
        if abs(float(heads.abs().sum()) - expected) > 0.01 * expected:
            self._checks.left = 0
            warn(
                "gradients were changed between backward and step(), by clipping or scaling. After freeze_step "
                "they are 1-bit Adam's momentum, which this damps in every step: clip nothing from there on "
                "(Hugging Face: max_grad_norm=0)"
            )


def _heads(tensors: Sequence[Tensor]) -> Float32[Tensor, "heads"]:
    return torch.cat([tensor.reshape(-1)[:HEAD].to(torch.float32) for tensor in tensors])
