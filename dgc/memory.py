"""Memories: what a compressor keeps of the gradients that it does not send, and how gradients are clipped before.

In each step a memory adds the gradient to its error state v. The compressor sends some elements of v. The memory
then subtracts from v what the other ranks receive, after rounding.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dgc.arguments import FLAG, NOTHING, NUMBER, checked, require
from dgc.bucket import Bucket
from dgc.comm.requests import AllReduce, Conversation
from dgc.kernels import PassInputs, SparseVector
from dgc.kernels.selection.reference import remove_nonfinite_
from dgc.state import DeferredUpdate, FlatState, Snapshots, load_parts, parts_of


@runtime_checkable
class Clipping(Protocol):
    """A rule that limits gradients, tensor by tensor (Lin et al. 2018, section 3.2).

    A memory clips this rank's local gradient before it enters the error state. The compressor's fallback sends
    some tensors dense. Their mean is clipped with the same limit: `clip_mean`.

    The paper scales its global threshold by N ** -0.5 for N ranks, because its local gradients contain the factor
    1/N. Here that factor is applied after the exchange. Pass the paper's threshold times N ** 0.5 as `max_norm`.

    Names in the original code and here:

        clip_grad_value_                    ClipByValue
        clip_grad_norm_                     ClipByNorm
        clip_grad_norm_2_by_global_         ClipByGlobalNorm
        clip_grad_value_by_global_norm_     ClipValueByGlobalNorm
    """

    def clip(self, bucket: Bucket) -> Conversation[None]:
        """Clip this rank's gradient in `bucket.flat` in place."""
        ...

    def clip_mean(self, bucket: Bucket) -> None:
        """Clip the mean over all ranks in `bucket.flat` in place, without a message.

        The mean is the same on every rank. The result must also be.
        """
        ...


@dataclass
class MomentumCorrection:
    """Momentum that a memory applies before compression. The optimizer must then not apply it.

    None stands for that of the optimizer, until `take`.
    """

    momentum: float | None
    nesterov: bool | None

    def take(self, momentum: float, nesterov: bool) -> None:
        """Use the optimizer's momentum where none was given."""
        if self.momentum is None:
            self.momentum = momentum
            self.nesterov = nesterov if self.nesterov is None else self.nesterov


@runtime_checkable
class Memory(Protocol):
    """Error state of one compressor: one flat fp32 tensor per bucket, saved under parameter names."""

    @property
    def correction(self) -> MomentumCorrection | None: ...

    @property
    def gradient_clipping(self) -> Clipping | None:
        """The limit on gradients. It also applies to the mean of tensors that a fallback sends dense."""
        ...

    def plan(self, bucket: Bucket) -> None:
        """Allocate the state of a bucket."""
        ...

    def clip(self, bucket: Bucket) -> Conversation[Tensor | None]:
        """Clip the bucket's local gradient in place. NaN and TOO_LARGE (`dgc.kernels`) count as zero.

        Returns:
            The index of the first element that was either, or n if there is none. None if nothing is clipped.
        """
        ...

    def pass_inputs(self, bucket: Bucket) -> PassInputs:
        """Return the pass that removes the previous step's sent elements from the state and adds the gradient.

        After the pass, `v` [n] fp32 holds all that is to be sent. The caller performs the pass exactly once and
        does not change v otherwise. `pass_inputs` is called only after the previous step is known to be valid.
        """
        ...

    def sent_(self, bucket: Bucket, sent: SparseVector) -> None:
        """Record the elements that the other ranks receive, with their values after rounding.

        `sent` is kept until the next pass. Its tensors must not be written to.
        """
        ...

    def returned_(self, bucket: Bucket, returned: SparseVector) -> None:
        """Record parts of the ranks' sum that no rank receives in this step, at most once per step.

        They are added to the error state of this rank as they are, and are kept until the next pass, like those of
        `sent_`. The momentum of these elements does not change.
        """
        ...

    def sent_all_(self, bucket: Bucket, values: Tensor) -> None:
        """Record that all of v was sent. `values` [n] fp32 are the sent values, after rounding."""
        ...

    def rollback_(self, bucket: Bucket) -> None:
        """Undo `sent_`, `returned_` or `sent_all_` of this step, bit for bit, because the step is dropped."""
        ...

    def errors(self) -> Iterable[Tensor]:
        """Return the unsent elements, one flat tensor per bucket, read-only."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class DeferringMemory:
    """Base class of memories with error feedback.

    The sent elements are removed in the pass of the next step, which reads and writes v anyway. If all of v is
    sent, the values are subtracted at once, and a snapshot keeps the old v for a dropped step.

    Args:
        v: Name of the accumulated gradients in errors.
        masking: Remove the sent elements from the momentum as well.
    """

    gradient_clipping: Clipping | None = None

    def __init__(self, v: str, masking: bool = False) -> None:
        self._v = FlatState(v)
        self._deferred, self._snapshots = DeferredUpdate(masking), Snapshots()

    def plan(self, bucket: Bucket) -> None:
        self._deferred.forget(bucket)
        self._v.add(bucket)

    def clip(self, bucket: Bucket) -> Conversation[Tensor | None]:
        if self.gradient_clipping is None:
            return None
        first = remove_nonfinite_(bucket.flat)
        yield from self.gradient_clipping.clip(bucket)
        return first

    def sent_(self, bucket: Bucket, sent: SparseVector) -> None:
        self._deferred.keep(bucket, sent)

    def returned_(self, bucket: Bucket, returned: SparseVector) -> None:
        self._deferred.keep_returned(bucket, returned)

    def sent_all_(self, bucket: Bucket, values: Tensor) -> None:
        self._snapshots.subtract(self._v, bucket, values)

    def rollback_(self, bucket: Bucket) -> None:
        self._deferred.forget(bucket)
        self._snapshots.rollback(bucket)

    def errors(self) -> Iterable[Tensor]:
        return self._deferred.errors(self._v)


@checked
class ResidualMemory(DeferringMemory):
    """Error feedback without momentum: the unsent rest is added to the next gradient.

        v = decay v + g;  what is sent is subtracted from v

    With decay = 1 this is Mem-SGD (Stich et al. 2018, arXiv 1809.07599), below 1 the memory of SparseLoCo (Sarfi
    et al. 2025, arXiv 2508.15706).

    Args:
        decay: Factor of the unsent rest in each step, in (0, 1]. Below 1 the rest is forgotten after about
            1 / (1 - decay) steps, as in SparseLoCo (0.95).

    Raises:
        ValueError: `decay` is out of range.

    Example:
        compression = DGCCompressor(0.01, memory=ResidualMemory())
    """

    correction: MomentumCorrection | None = None

    def __init__(self, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise ValueError(f"decay must be in (0, 1], not {decay}: NoMemory() keeps nothing of the rest")
        self.decay = decay
        super().__init__("residual")

    def pass_inputs(self, bucket: Bucket) -> PassInputs:
        self._snapshots.forget(bucket)
        v = self._v[bucket]
        if self.decay != 1:
            self._deferred.apply_(bucket, None, v)  # what was sent must not decay with the rest
            self._deferred.forget(bucket)
            v.mul_(self.decay)
        return PassInputs(bucket.gradients, None, v, sent=self._deferred.begin_pass_(bucket, None, v))

    def state_dict(self) -> dict[str, Any]:
        residuals: dict[str, Tensor] = {}
        for (bucket, _), error in zip(self._v.items(), self.errors(), strict=True):
            residuals |= parts_of(bucket, error)
        return {"residuals": residuals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_parts({"residuals": self._v}, state)
        self._deferred.clear()


class NoMemory:
    """No error feedback: unsent elements are discarded."""

    correction: MomentumCorrection | None = None
    gradient_clipping: Clipping | None = None

    def plan(self, bucket: Bucket) -> None:
        pass

    def clip(self, bucket: Bucket) -> Conversation[Tensor | None]:
        yield from ()
        return None

    def pass_inputs(self, bucket: Bucket) -> PassInputs:
        nothing = torch.zeros(bucket.numel, dtype=torch.float32, device=bucket.device)
        return PassInputs(bucket.gradients, None, nothing)

    def sent_(self, bucket: Bucket, sent: SparseVector) -> None:
        pass

    def returned_(self, bucket: Bucket, returned: SparseVector) -> None:
        pass

    def sent_all_(self, bucket: Bucket, values: Tensor) -> None:
        pass

    def rollback_(self, bucket: Bucket) -> None:
        pass

    def errors(self) -> Iterable[Tensor]:
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"state of another memory: {sorted(state)}")


class DGCSGDMemory(DeferringMemory):
    """Error feedback with momentum correction and momentum factor masking (Lin et al. 2018, arXiv 1712.01887,
    sections 3.1 to 3.3, Algorithm 1).

    With gradient g, momentum m, local momentum u and accumulated velocity v of one rank:

        plain      u = m u + g          v = v + u
        Nesterov   u = m (u + g)        v = v + u + g
        sent       v_i = 0 where sent; u_i = 0 there too with masking
        returned   v_i = v_i + value where an exchange gives back a part of the ranks' sum; u_i stays
        dropped    v_i and u_i keep their values from before sending; the gradient stays in them

    Differences from the paper: the rounding error of the payload stays in v. If all of v is sent (ratio 1, or a
    payload that would cost more than dense), no element is stale and u is not masked. The step is then ordinary
    momentum.

    Args:
        momentum: Momentum coefficient in [0, 1). None: that of the optimizer, which any other must equal.
        nesterov: Use Nesterov momentum. None: as the optimizer does, or False if `momentum` is given.
        gradient_clipping: One of ClipByNorm, ClipByValue, ClipByGlobalNorm, ClipValueByGlobalNorm, or None. Each
            tensor's local gradient is clipped before momentum, in dense warm-up steps as well. Tensors that the
            compressor's fallback sends dense (usually vectors) are clipped after averaging, with the same limit.
            Tensors that a Route assigns to another compressor are not clipped here.
        momentum_masking: Set the momentum of sent elements to zero.

    Raises:
        ValueError: `momentum` is outside [0, 1), or `gradient_clipping` is not a clipping object.

    Example:
        memory = DGCSGDMemory(gradient_clipping=ClipByNorm(1.0))
        compression = DGCCompressor(0.001, memory=memory)
    """

    def __init__(
        self,
        momentum: float | None = None,
        nesterov: bool | None = None,
        gradient_clipping: Clipping | None = None,
        momentum_masking: bool = True,
    ):
        require("a number or None", NUMBER + NOTHING, momentum=momentum)
        require("True, False or None", FLAG + NOTHING, nesterov=nesterov)
        require("True or False", FLAG, momentum_masking=momentum_masking)
        if momentum is not None and not 0 <= momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), not {momentum}")
        if not isinstance(gradient_clipping, Clipping | None) or isinstance(gradient_clipping, type):
            raise ValueError(
                "gradient_clipping must be None or one of dgc.memory's ClipByNorm(...), ClipByValue(...), "
                f"ClipByGlobalNorm(...) and ClipValueByGlobalNorm(), not {gradient_clipping!r}"
            )
        super().__init__("velocity", momentum_masking)
        self.correction = MomentumCorrection(momentum, nesterov if momentum is None else bool(nesterov))
        self.gradient_clipping, self.momentum_masking = gradient_clipping, momentum_masking
        self._momentums = FlatState("momentum")

    @property
    def momentum(self) -> float | None:
        return self.correction.momentum

    @property
    def nesterov(self) -> bool | None:
        return self.correction.nesterov

    def plan(self, bucket: Bucket) -> None:
        if self.momentum is None:
            raise ValueError(
                "DGCSGDMemory() takes the momentum of an optimizer, and is used without one here: pass it, as in "
                "DGCSGDMemory(momentum=0.9)"
            )
        super().plan(bucket)
        self._momentums.add(bucket)

    def pass_inputs(self, bucket: Bucket) -> PassInputs:
        self._snapshots.forget(bucket)
        u, v = self._momentums[bucket], self._v[bucket]
        sent = self._deferred.begin_pass_(bucket, u, v)
        momentum, nesterov = float(self.momentum or 0), bool(self.nesterov)
        return PassInputs(bucket.gradients, u, v, momentum, nesterov, sent, self.momentum_masking)

    def state_dict(self) -> dict[str, Any]:
        momentums: dict[str, Tensor] = {}
        velocities: dict[str, Tensor] = {}
        for (bucket, u), v in zip(self._momentums.items(), self._v, strict=True):
            u, v = u.clone(), v.clone()
            self._deferred.apply_(bucket, u, v)
            momentums |= parts_of(bucket, u)
            velocities |= parts_of(bucket, v)
        return {"momentums": momentums, "velocities": velocities}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_parts({"momentums": self._momentums, "velocities": self._v}, state)
        self._deferred.clear()


# --- clipping --------------------------------------------------------------------------------------


def _require_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not value > 0:
        raise ValueError(f"{name} must be a positive number, not {value!r}")


def _parts(bucket: Bucket) -> list[Tensor]:
    return [bucket.flat[s.offset : s.offset + s.numel] for s in bucket.segments]


def _mean_squares(bucket: Bucket) -> Conversation[Tensor]:
    """Return the mean over all ranks of each tensor's squared L2 norm, [tensors] fp32."""
    squares = torch.stack([part.to(torch.float32).square().sum() for part in _parts(bucket)])
    (mean,) = yield (AllReduce(squares),)
    return mean


@dataclass(frozen=True)
class ClipByValue:
    """Clip each element: g = min(max(g, -clip_value), clip_value).

    Args:
        clip_value: Largest magnitude, a positive number.

    Raises:
        ValueError: `clip_value` is not a positive number.
    """

    clip_value: float

    def __post_init__(self) -> None:
        _require_positive("clip_value", self.clip_value)

    def clip(self, bucket: Bucket) -> Conversation[None]:
        self.clip_mean(bucket)
        yield from ()

    def clip_mean(self, bucket: Bucket) -> None:
        bucket.flat.clamp_(-self.clip_value, self.clip_value)


@dataclass(frozen=True)
class ClipByNorm:
    """Scale each tensor by its local norm: g = g * min(1, max_norm / |g|).

    Args:
        max_norm: Largest norm of a tensor, a positive number.
        norm_type: p of the p-norm, a positive number. float("inf") is the largest magnitude.

    Raises:
        ValueError: An argument is not a positive number.

    Example:
        memory = DGCSGDMemory(momentum=0.9, gradient_clipping=ClipByNorm(1.0))
    """

    max_norm: float
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        _require_positive("max_norm", self.max_norm)
        _require_positive("norm_type", self.norm_type)

    def clip(self, bucket: Bucket) -> Conversation[None]:
        self._clip(bucket, torch.float32)
        yield from ()

    def clip_mean(self, bucket: Bucket) -> None:
        # fp64: the order of summation depends on the CPU's vector width, and an fp32 sum would differ between CPUs
        self._clip(bucket, torch.float64)

    def _clip(self, bucket: Bucket, dtype: torch.dtype) -> None:
        for part in _parts(bucket):
            if part.numel():  # an empty tensor has no largest magnitude
                norm = part.norm(self.norm_type, dtype=dtype).float()
                part.mul_((self.max_norm / (norm + 1e-6)).clamp(max=1.0))


@dataclass(frozen=True)
class ClipByGlobalNorm:
    """Scale each tensor by the root mean square, over all ranks, of its L2 norm. The scale is equal on all ranks.

    Costs one all-reduce per bucket, with one number per tensor. `clip_mean` sends no message: a mean gradient is
    the same on every rank, so its local norm is the global one.

    Args:
        max_norm: Largest norm of a tensor, a positive number.

    Raises:
        ValueError: `max_norm` is not a positive number.
    """

    max_norm: float

    def __post_init__(self) -> None:
        _require_positive("max_norm", self.max_norm)

    def clip(self, bucket: Bucket) -> Conversation[None]:
        squares = yield from _mean_squares(bucket)
        scales = (self.max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for part, scale in zip(_parts(bucket), scales, strict=True):
            part.mul_(scale)

    def clip_mean(self, bucket: Bucket) -> None:
        ClipByNorm(self.max_norm).clip_mean(bucket)


@dataclass(frozen=True)
class ClipValueByGlobalNorm:
    """Clip each element to the root mean square, over all ranks, of the tensor's L2 norm.

    g = min(max(g, -limit), limit). Costs one all-reduce per bucket, with one number per tensor. `clip_mean`
    changes nothing: no element of a mean gradient exceeds the norm of its tensor.
    """

    def clip(self, bucket: Bucket) -> Conversation[None]:
        squares = yield from _mean_squares(bucket)
        for part, limit in zip(_parts(bucket), squares.sqrt(), strict=True):
            part.clamp_(-limit, limit)

    def clip_mean(self, bucket: Bucket) -> None:
        return None
