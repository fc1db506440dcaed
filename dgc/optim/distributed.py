"""DistributedOptimizer: Horovod's interface, with compression that holds conversations.

Gradients are views into flat buckets; a bucket starts its conversation during backward, as soon as it is full;
`step()` finishes them all and lets the wrapped optimizer step on the averaged gradients.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import sqrt
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.comm.collectives import all_gather_object
from dgc.comm.meter import Meter
from dgc.comm.transport import Transport
from dgc.compression.dense import Cast, Dense, HorovodCompression
from dgc.compression.protocol import Compressor, SparseResult
from dgc.compression.route import Route, Rule
from dgc.optim.broadcast import default_transport
from dgc.optim.exchange import GradientExchange
from dgc.optim.momentum import check_momentum
from dgc.optim.planning import describe, plan_buckets

_optimizers_of: WeakKeyDictionary[Transport, int] = WeakKeyDictionary()


class DistributedOptimizer(Optimizer):
    """Wraps an optimizer. Learning-rate schedulers, parameter groups and state are the wrapped optimizer's.

    compression: a compressor of `dgc.compression`, a Route, or Horovod's Compression.none and .fp16.
    op: "average" or "sum" (Horovod's Average and Sum work as well).
    bucket_mb: size of a bucket in MB. transport: who carries the messages; None is Horovod.

    Parameters that need no gradient when this is built take no part. `groups`, `num_groups` and
    `sparse_as_dense` of Horovod's signature are accepted: buckets take the place of groups, and sparse
    gradients always travel as dense ones do.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        compression: Compressor | Route | HorovodCompression | None = None,
        backward_passes_per_step: int = 1,
        op: Any = "average",
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        sparse_as_dense: bool = False,
        *,
        bucket_mb: float = 25.0,
        transport: Transport | None = None,
    ):
        if backward_passes_per_step < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, not {backward_passes_per_step}")
        if gradient_predivide_factor != 1.0:
            raise ValueError("gradient_predivide_factor is not supported: leave it at 1.0")
        if num_groups or groups is not None:
            warnings.warn("groups and num_groups have no effect here: use bucket_mb", stacklevel=2)
        self.inner: Any = optimizer
        self.transport = transport or default_transport()
        self.meter = Meter()
        self._scale = _scale_of(op, self.transport.size)
        named = name_parameters(optimizer, named_parameters)
        self.route = _as_route(compression)
        planned = plan_buckets(named, self.route.compressor_for, bucket_mb, _unused_prefix(self.transport))
        compressors = {p: plan.compressor for plan in planned for p in plan.parameters}
        # in the order of the model, which names their saved states, whatever the buckets are
        self._compressors = list({id(compressors[p]): compressors[p] for _, p in named}.values())
        check_momentum(optimizer, planned)
        self._check_agreement(describe(planned))
        for plan in planned:
            plan.compressor.plan(plan.bucket, self.transport.size)
        self.exchange = GradientExchange(planned, backward_passes_per_step, self.transport, self.meter)
        self._should_synchronize = True
        self.exchange.zero()

    def _check_agreement(self, own: list[Any]) -> None:
        for rank, other in enumerate(all_gather_object(self.transport, own, "plan")):
            if other != own:
                difference = next(
                    (f"{a} there, {b} here" for a, b in zip(other, own, strict=False) if a != b),
                    f"{len(other)} gradients there, {len(own)} here",
                )
                raise ValueError(
                    f"rank {rank} and rank {self.transport.rank} train different models or compress them "
                    f"differently: {difference}"
                )

    # --- one step ---------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until .grad of every parameter is the average over all ranks."""
        for plan, result in zip(self.exchange.planned, self.exchange.finish(), strict=True):
            if isinstance(result, SparseResult):
                plan.bucket.flat.zero_()
                plan.bucket.flat[result.indices] = result.values.to(plan.bucket.flat.dtype)
            if self._scale != 1:
                plan.bucket.flat.mul_(self._scale)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, step() takes the gradients as they are: for use after synchronize()."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Exchange what is not yet exchanged, then step the wrapped optimizer.

        Where that optimizer takes sparse updates, .grad of a compressed parameter is this rank's own gradient
        afterwards; synchronize() makes it the average.
        """
        self._refuse_thawed()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.exchange.had_backward and self._is_state_initialisation():
            return loss
        sparse = {}
        if self._should_synchronize and self.exchange.averaged:
            warnings.warn(
                "step() after synchronize() without skip_synchronize(): the gradients are not exchanged again",
                stacklevel=2,
            )
        elif self._should_synchronize and hasattr(self.inner, "leave_momentum_of") and self._scale == 1:
            sparse = self._synchronize_sparse()
        elif self._should_synchronize:
            self.synchronize()
        start = perf_counter()
        self.inner.step(**({"sparse": sparse} if sparse else {}))
        self.meter.seconds["step"] += perf_counter() - start
        self.exchange.averaged = False
        return loss

    def _synchronize_sparse(self) -> dict[Tensor, tuple[Tensor, Tensor]]:
        """As synchronize(), but sparse results are returned by parameter in place of being made dense."""
        updates = {}
        for plan, result in zip(self.exchange.planned, self.exchange.finish(), strict=True):
            if isinstance(result, SparseResult):
                offsets = torch.tensor([s.offset for s in plan.bucket.segments], device=result.indices.device)
                starts = [*torch.searchsorted(result.indices, offsets).tolist(), result.indices.numel()]
                for i, (p, segment) in enumerate(zip(plan.parameters, plan.bucket.segments, strict=True)):
                    own = slice(starts[i], starts[i + 1])
                    updates[p] = (result.indices[own] - segment.offset, result.values[own])
        return updates

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients. They stay views into the buckets whatever `set_to_none` says."""
        self.exchange.zero()
        for p in (p for group in self.param_groups for p in group["params"] if p not in self.exchange):
            p.grad = None

    def close(self) -> None:
        """Take the hooks off the parameters, so that another DistributedOptimizer may wrap them."""
        self.exchange.close()

    def _refuse_thawed(self) -> None:
        """A parameter outside of all buckets would train on this rank's gradients alone."""
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                if p.requires_grad and p not in self.exchange:
                    raise ValueError(
                        f"parameter {i} of group {g}, of shape {tuple(p.shape)}, needs a gradient now but did not "
                        "when DistributedOptimizer was built: close() it and wrap the optimizer again"
                    )

    def _is_state_initialisation(self) -> bool:
        """Whether this is hvd.broadcast_optimizer_state, which steps on zeros to make the optimizer's state.

        That step would decay the weights before training begins; state that all ranks lack alike needs no
        broadcast.
        """
        gradients = [p.grad for plan in self.exchange.planned for p in plan.parameters]
        views = {id(view) for plan in self.exchange.planned for view in plan.views}
        foreign = [g for g in gradients if g is not None and id(g) not in views]
        return bool(foreign) and len(foreign) == len(gradients) and not any(g.count_nonzero() for g in foreign)

    # --- compression ------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> float:
        """Tell the compressors the epoch, counted from 0, for their warm-up; the compress_ratio now."""
        for compressor in self._compressors:
            compressor.begin_epoch(epoch)
        return self.compress_ratio

    @property
    def compress_ratio(self) -> float:
        """The smallest nominal fraction of elements that a compressor sends now; 1.0 is dense."""
        return min((c.compress_ratio for c in self._compressors), default=1.0)

    def error_norm(self) -> float:
        """L2 norm of this rank's error state: what waits to be sent."""
        squares = [float(e.norm(dtype=torch.float64)) ** 2 for c in self._compressors for e in c.errors()]
        return sqrt(sum(squares))

    def compression_state_dict(self) -> dict[str, Any]:
        """This rank's error state. Unlike `state_dict()` it differs between ranks: save it on each of them."""
        return {f"{type(c).__name__}.{i}": c.state_dict() for i, c in enumerate(self._compressors)}

    def load_compression_state_dict(self, state: dict[str, Any]) -> None:
        own = {f"{type(c).__name__}.{i}": c for i, c in enumerate(self._compressors)}
        if own.keys() != state.keys():
            raise ValueError(f"the state is of other compressors: {sorted(state)}, here are {sorted(own)}")
        for name, compressor in own.items():
            compressor.load_state_dict(state[name])

    # --- the wrapped optimizer's ------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, the same on every rank."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError("parameters cannot be added here: add the group before DistributedOptimizer wraps it")

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet: a copy under construction
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.inner!r}, size={self.transport.size})"


def _unused_prefix(transport: Transport) -> str:
    """A name that no other optimizer on this transport has; all ranks build theirs in one order."""
    _optimizers_of[transport] = number = _optimizers_of.get(transport, -1) + 1
    return f"dgc{number}"


def name_parameters(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> list[tuple[str, Tensor]]:
    """(name, parameter) of every parameter of the optimizer that needs a gradient, each once, in model order."""
    owned = {
        p: f"group{g}.param{i}"
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    }
    if named_parameters is None:
        named = [(name, p) for p, name in owned.items()]
    else:
        unique = {p: name for name, p in reversed(list(named_parameters)) if p in owned}
        named = [(name, p) for p, name in reversed(unique.items())]
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"named_parameters holds different parameters of one name: {', '.join(twice)}")
    known = {p for _, p in named}
    unnamed = [name for p, name in owned.items() if p.requires_grad and p not in known]
    if unnamed:
        raise ValueError(f"named_parameters lacks {len(unnamed)} parameters of the optimizer: {unnamed[:5]}")
    return [(name, p) for name, p in named if p.requires_grad]


def _as_route(compression: Any) -> Route:
    if isinstance(compression, Route):
        return compression
    if compression is None:
        return Route([Rule(Dense())])
    if hasattr(compression, "reduce"):
        return Route([Rule(compression)])
    if hasattr(compression, "compress") and hasattr(compression, "decompress"):
        return Route([Rule(Cast(compression))])
    raise ValueError(f"compression must be a compressor, a Route or a Horovod compression, not {compression!r}")


def _scale_of(op: Any, size: int) -> int:
    """What the mean over ranks is multiplied by. Horovod's constants are recognised by their names."""
    name = {"0": "average", "1": "sum"}.get(str(op), str(op)).lower()
    if name in ("average", "mean"):
        return 1
    if name == "sum":
        return size
    raise ValueError(f"op must be 'average' or 'sum', not {op!r}")
