"""Deep Gradient Compression with Adam: momentum correction of preconditioned gradients.

The optimizer is `dgc.optim.DGCAdam`, which says which stage a step is in. In step t = 1, 2, ..:

    t <= T_w     result = mean over the ranks of g_i, not compressed
    t > T_w      h_i = g_i / (sqrt(v / c2) + eps)          v, c2: those of step T_w, the same on every rank
                 result = DGC of h_i: momentum correction with beta1, error feedback, the largest elements

Adam divides by the root of its second moment. Of an element that is sent once in 1/p steps, in one large sum, this
root is about sqrt(p) times that sum: error feedback before Adam therefore moves it 1/sqrt(p) times as far as one
gradient would, in place of 1/p times. With p = 1 % steps are ten times too short. Here the division comes before
compression, by a second moment that no longer changes, so that all that follows is linear in the gradient, and
what is sent late is not sent smaller.

Sources: DGC is Lin et al. 2018 (arXiv 1712.01887), sections 3.1 to 3.3. The constant second moment after a dense
warm-up is that of 1-bit Adam (Tang et al. 2021, arXiv 2102.02888, Algorithm 1). To combine them is this project's.

Differences from DGC's paper: momentum is not masked where an element is sent. The warm-up is dense.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dgc.bucket import Bucket
from dgc.comm.requests import Conversation
from dgc.compression.dense import for_gradients
from dgc.compression.protocol import MomentumOwner, Preconditioner, Result, StatelessCompressor
from dgc.compression.sparse.dgc import DGCCompressor
from dgc.memory import DGCSGDMemory
from dgc.memory.protocol import MomentumCorrection


class DGCAdamCompressor(DGCCompressor):
    """Gradients at first, then DGC of gradients that Adam's second moment has divided.

    It needs `dgc.optim.DGCAdam` as the optimizer. From step `freeze_step` of that on, .grad is a mean of updates
    and no longer the gradient: do not clip it.

    Args:
        compress_ratio (float): fraction of elements sent; above 1 the factor saved (1000 means 0.001).
        gradients (StatelessCompressor, optional): exchanges the gradients of the warm-up; None sends them in their
            own dtype, `FP16Compressor()` in half the bytes.
        options: those of `DGCCompressor`, except `memory`.

    Raises:
        ValueError: if an argument has a wrong type or is out of range; by `DistributedOptimizer`, if the optimizer
            is not a DGCAdam, or its groups differ in beta1.

    Example:
        >>> optimizer = DGCAdam(model.parameters(), lr=1e-3, freeze_step=1000)
        >>> optimizer = DistributedOptimizer(optimizer, model.named_parameters(), DGCAdamCompressor(0.01))
    """

    def __init__(self, compress_ratio: float, gradients: StatelessCompressor | None = None, **options: Any):
        if "memory" in options:
            raise ValueError("DGCAdamCompressor has a memory of its own: leave `memory` out")
        self._memory = DGCSGDMemory(momentum_masking=False)
        super().__init__(compress_ratio, self._memory, **options)
        self._gradients = for_gradients(gradients)
        self._owner: Preconditioner | None = None
        self._parameters: dict[str, Tensor] = {}

    def exchange_momentum_of(self, owner: MomentumOwner, parameters: Mapping[str, Tensor]) -> None:
        """Take second moment, beta1 and stage from this optimizer. parameters: this compressor's, by name."""
        if not isinstance(owner, Preconditioner):
            raise ValueError(
                f"DGCAdamCompressor needs a second moment that stays constant, and {type(owner).__name__} does "
                "not share its own: use dgc.optim.DGCAdam"
            )
        betas = sorted({beta1 for beta1, _ in owner.momentum_of(list(parameters.values()))})
        if len(betas) != 1:
            raise ValueError(f"DGCAdamCompressor applies one beta1 to all parameters, not {betas}: use one")
        self._owner, self._parameters, self._memory.momentum = owner, dict(parameters), betas[0]

    @property
    def correction(self) -> MomentumCorrection | None:
        return None  # the optimizer knows that .grad is the mean of updates

    def plan(self, bucket: Bucket, size: int, rank: int) -> None:
        if self._owner is None:
            raise ValueError(
                "DGCAdamCompressor divides by the second moment of a dgc.optim.DGCAdam, and has none: wrap that "
                "optimizer in DistributedOptimizer, or pass it to dgc.ddp.compress; for other optimizers, use "
                "DGCCompressor"
            )
        super().plan(bucket, size, rank)

    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        assert self._owner is not None
        if not self._owner.exchanges_momentum:
            self._sent_dense[bucket.name] = bucket.numel
            return (yield from self._gradients.reduce(bucket))
        flat, parameters = bucket.flat, [self._parameters[s.name] for s in bucket.segments]
        for s, factor in zip(bucket.segments, self._owner.preconditioner_of(parameters), strict=True):
            s.of(flat).mul_(factor)
        return (yield from super().reduce(bucket))
