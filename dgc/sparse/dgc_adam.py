"""The exchange of DGC for Adam: gradients in a warm-up, then what the optimizer has made of them.

It needs its optimizer, `dgc.optim.DGCAdam`, which owns the moments and says which stage a step is in. T_w is
its `freeze_step`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from dgc.comm.requests import Conversation
from dgc.core.bucket import Bucket
from dgc.core.dense import for_gradients
from dgc.core.momentum import MomentumCorrection
from dgc.core.protocol import MomentumOwner, Preconditioner, StatelessCompressor, Use
from dgc.core.results import Reduced
from dgc.sparse.compressor import SparseCompressor
from dgc.sparse.dgc import DGCCompressor
from dgc.sparse.memories import DGCSGDMemory, SparseState


class DGCAdamCompressor(DGCCompressor):
    """Deep Gradient Compression of gradients that Adam's second moment has divided.

    In step t = 1, 2, ..:

        t <= T_w     result = mean over the ranks of g_i, not compressed
        t > T_w      h_i = g_i / (sqrt(v / c2) + eps)          v, c2: from step T_w, the same on every rank
                     result = DGC of h_i: momentum correction with beta1, error feedback, the largest elements

    Adam divides by the root of its second moment. Of an element that is sent once in 1/p steps, in one large sum,
    this root is about sqrt(p) times that sum: error feedback before Adam therefore moves it 1/sqrt(p) times as far
    as one gradient would, in place of 1/p times. With p = 1 % steps are ten times too short. Here the division
    comes before compression, by a second moment that no longer changes: what is sent late is not sent smaller.

    DGC is Lin et al. 2018 (arXiv 1712.01887), sections 3.1 to 3.3, here with a dense warm-up and without masking.
    The constant second moment comes from 1-bit Adam (arXiv 2102.02888, Algorithm 1). Their combination is this
    project's. From step `freeze_step` on, .grad is a mean of updates and no longer the gradient: do not clip it.

    Args:
        gradients (StatelessCompressor, optional): as `OneBitAdamCompressor`.
        compress_ratio, options: as `DGCCompressor`, without `memory`.

    Raises:
        ValueError: if an argument is wrong; by `DistributedOptimizer`, if the optimizer is not a DGCAdam, or its
            groups differ in beta1.

    Example:
        >>> optimizer = DGCAdam(model.parameters(), lr=1e-3, freeze_step=1000)
        >>> optimizer = DistributedOptimizer(optimizer, model.named_parameters(), DGCAdamCompressor(0.01))
    """

    @property
    def unsuited(self) -> Mapping[Use, str]:  # type: ignore[override]
        return {}  # what it exchanges is divided already

    def __init__(self, compress_ratio: float, gradients: StatelessCompressor | None = None, **options: Any):
        if "memory" in options:
            raise ValueError("DGCAdamCompressor has a memory of its own: leave `memory` out")
        super().__init__(compress_ratio, DGCSGDMemory(momentum_masking=False), **options)
        self._gradients = for_gradients(gradients)
        self._owner: Preconditioner | None = None
        self._parameters: dict[str, Tensor] = {}

    def bound_to(self, owner: MomentumOwner, parameters: Mapping[str, Tensor]) -> SparseCompressor:
        """Return the compressor that takes second moment, beta1 and stage from this optimizer."""
        if not isinstance(owner, Preconditioner):
            raise ValueError(
                f"DGCAdamCompressor needs a second moment that stays constant, and {type(owner).__name__} does "
                "not share its own: use dgc.optim.DGCAdam"
            )
        betas = sorted({beta1 for beta1, _ in owner.momentum_of(list(parameters.values()))})
        if len(betas) != 1:
            raise ValueError(f"DGCAdamCompressor applies one beta1 to all parameters, not {betas}: use one")
        memory = self.memory.with_momentum(betas[0], nesterov=False)
        return self._for_a_run(memory=memory, _owner=owner, _parameters=dict(parameters))

    @property
    def correction(self) -> MomentumCorrection | None:
        return None  # the optimizer knows that .grad is the mean of updates

    def init(self, bucket: Bucket, size: int, rank: int) -> SparseState:
        if self._owner is None:
            raise ValueError(
                "DGCAdamCompressor divides by the second moment of a dgc.optim.DGCAdam, and has none: wrap that "
                "optimizer in DistributedOptimizer, or pass it to dgc.ddp.compress; for other optimizers, use "
                "DGCCompressor"
            )
        return super().init(bucket, size, rank)

    def reduce(self, bucket: Bucket, state: SparseState) -> Conversation[Reduced]:
        assert self._owner is not None
        if not self._owner.exchanges_momentum:
            return (yield from self._gradients.reduce(bucket, replace(state, dense=True)))
        flat, parameters = bucket.flat, [self._parameters[s.name] for s in bucket.segments]
        for s, factor in zip(bucket.segments, self._owner.preconditioner_of(parameters), strict=True):
            s.of(flat).mul_(factor)
        return (yield from super().reduce(bucket, state))
