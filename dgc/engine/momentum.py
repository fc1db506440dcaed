"""How a compressor and the optimizer of its means go together: exactly one of them applies momentum, and some
methods were measured to lose quality with some optimizers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer

from dgc.comm.transport import Transport
from dgc.core.protocol import Compressor, ExchangesMomentum, MomentumOwner, Use
from dgc.engine.agreement import check_settings
from dgc.engine.buckets import PlannedBucket, SparseUpdate, replace_compressors
from dgc.warn import warn


@runtime_checkable
class SupportsCorrectedGradients(Protocol):
    """An optimizer that leaves momentum to the compressor's memory and applies sparse updates directly."""

    def skip_momentum_of(self, parameters: Iterable[Tensor]) -> None: ...

    def step(self, closure: Callable[[], Any] | None = None, sparse: Sequence[SparseUpdate] = ()) -> Any: ...


@runtime_checkable
class ChoosesByProcessor(Protocol):
    """An optimizer with settings that it chooses by the processor, and on which its result depends."""

    @property
    def chosen_by_processor(self) -> Mapping[str, object]: ...


def uses(optimizer: Optimizer, of_gradients: bool) -> dict[Tensor, Use]:
    """What the optimizer does with the means of parameters for which not every compressor suits.

    of_gradients: whether they are of gradients. Otherwise the optimizer has made what is averaged.
    """
    found: dict[Tensor, Use] = {}
    for group in optimizer.param_groups:
        if "ns_steps" in group:  # of torch's Muon, and of ours
            found |= dict.fromkeys(group["params"], Use.MUON if of_gradients else Use.OUTER_MUON)
        elif "betas" in group and of_gradients:
            found |= dict.fromkeys(group["params"], Use.ADAM)
    return found


def compressors_of(planned: Sequence[PlannedBucket]) -> dict[Tensor, Compressor]:
    return {p: plan.compressor for plan in planned for p in plan.parameters}


def warn_of_unsuited(
    optimizer: Optimizer,
    compressors: Mapping[Tensor, Compressor],
    transport: Transport,
    of_gradients: bool = True,
) -> None:
    """Let rank 0 warn of compressors of gradients, or of pseudo-gradients, that do not suit the optimizer.

    Vectors do not count: they are few, and their neighbours decide.
    """
    if transport.rank:
        return
    found = {
        (type(compressor).__name__, compressor.unsuited[use])
        for p, use in uses(optimizer, of_gradients).items()
        if p.dim() > 1 and (compressor := compressors.get(p)) is not None and use in compressor.unsuited
    }
    for kind, reason in sorted(found):
        warn(f"{kind} {reason}: use TwoPhaseCompressor(bits=8)")


class MomentumCheck:
    """Assigns momentum to the memory or the optimizer, and checks at every step that their settings stay equal.

    A scheduler that cycles momentum, or a loaded state, changes the momentum of the optimizer only.

    factor: of the mean over the ranks, in the optimizer's gradients. Raises ValueError as `assign_momentum` and
    `share_momentum`, and if ranks with other processors have chosen other settings.
    """

    def __init__(
        self, optimizer: Optimizer, planned: Sequence[PlannedBucket], transport: Transport, factor: int = 1
    ):
        assign_momentum(optimizer, planned)
        share_momentum(optimizer, planned, transport, factor)
        if isinstance(optimizer, ChoosesByProcessor):
            try:
                check_settings(transport, "optimizer.processor", **optimizer.chosen_by_processor)
            except ValueError as error:
                raise ValueError(
                    f"{error}. Ranks with other processors choose otherwise: give the setting"
                ) from None
        compressors = compressors_of(planned)
        warn_of_unsuited(optimizer, compressors, transport)
        if transport.rank == 0:
            warn_of_momentum_twice(optimizer, compressors)
        corrected = {p for plan in planned if plan.compressor.correction is not None for p in plan.parameters}
        self._optimizer = ref(optimizer)
        self.watched = [
            (g, group.get("momentum", 0.0))
            for g, group in enumerate(optimizer.param_groups)
            if not corrected.isdisjoint(group["params"])
        ]

    def check(self, optimizer: Optimizer) -> None:
        if self.watched and optimizer is not self._optimizer():
            raise ValueError(
                f"this {type(optimizer).__name__} was not told that the compression's memory applies momentum: "
                "close() the exchange, and build it with this optimizer"
            )
        for g, momentum in self.watched:
            # some broadcasts of optimizer state round to fp32
            if abs((now := optimizer.param_groups[g].get("momentum", 0.0)) - momentum) > 1e-6:
                raise ValueError(
                    f"the momentum of group {g} was {momentum} and is now {now}, but the compression's memory "
                    "applies momentum: it must not change (set cycle_momentum=False in a scheduler that cycles it)"
                )


def check_owned(optimizer: Optimizer | None, planned: Sequence[PlannedBucket]) -> None:
    """Raise ValueError unless the optimizer has all parameters to which a memory applies momentum."""
    owned = set() if optimizer is None else {p for group in optimizer.param_groups for p in group["params"]}
    others = [
        segment.name
        for plan in planned
        if plan.compressor.correction is not None
        for segment, p in zip(plan.bucket.segments, plan.parameters, strict=True)
        if p not in owned
    ]
    if others and optimizer is None:
        raise ValueError(
            "the compression's memory applies momentum, which the optimizer must not apply again: pass the "
            "optimizer to compress"
        )
    if others:
        raise ValueError(
            f"the memory applies momentum to {len(others)} parameters that the optimizer lacks, such as "
            f"{others[0]}: pass one optimizer with all of them"
        )


def warn_of_momentum_twice(optimizer: Optimizer, compressors: Mapping[Tensor, Compressor]) -> None:
    """Warn if a compressor returns a momentum of gradients, to which the optimizer applies its own."""
    for group in optimizer.param_groups:
        found = {type(c).__name__ for p in group["params"] if (c := compressors.get(p)) and c.has_momentum}
        if found and group.get("momentum"):
            kind = type(optimizer).__name__
            warn(f"{min(found)} has momentum, and {kind} applies its own again: set momentum=0.0")
            return


def take_momentum(optimizer: Optimizer, planned: Sequence[PlannedBucket]) -> None:
    """Replace each compressor whose memory has no momentum of its own by one with the optimizer's.

    It is the momentum of the first group with a parameter of the compressor.
    """
    compressors, bound = compressors_of(planned), {}
    for group in optimizer.param_groups:
        momentum, nesterov = group.get("momentum", 0.0), bool(group.get("nesterov"))
        for compressor in {id(c): c for p in group["params"] if (c := compressors.get(p))}.values():
            correction = compressor.correction
            if correction is not None and correction.momentum is None and id(compressor) not in bound:
                bound[id(compressor)] = compressor.with_momentum(momentum, nesterov)
    replace_compressors(planned, bound)


def assign_momentum(optimizer: Optimizer, planned: Sequence[PlannedBucket]) -> None:
    """Decide whether the memory or the optimizer applies momentum to each parameter, after `take_momentum`.

    Raises:
        ValueError: Both would apply it, or their settings differ. The message names the cure.
    """
    take_momentum(optimizer, planned)
    corrected = {
        p: correction
        for plan in planned
        if (correction := plan.compressor.correction) is not None
        for p in plan.parameters
    }
    if not corrected:
        return
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        of_group = [corrected[p] for p in group["params"] if p in corrected]
        for correction in {id(c): c for c in of_group}.values():
            if not isinstance(optimizer, SupportsCorrectedGradients):
                if group.get("momentum", 0) or "betas" in group:
                    cure = "dgc.optim.DGCSGD, or a memory without momentum (ResidualMemory)"
                    if "betas" in group:
                        of_adam = "DGCAdam with DGCAdamCompressor, OneBitAdam with OneBitAdamCompressor"
                        cure = f"{of_adam}, {cure}"
                    raise ValueError(
                        f"the compression's memory applies momentum, and {kind} would apply it again: use {cure}"
                    )
            elif (group["momentum"], group["nesterov"]) != (correction.momentum, correction.nesterov):
                raise ValueError(
                    f"the compression's memory has momentum={correction.momentum}, "
                    f"nesterov={correction.nesterov}, the optimizer momentum={group['momentum']}, "
                    f"nesterov={group['nesterov']}: they must agree"
                )
            elif group["dampening"]:
                raise ValueError("dampening is not defined for momentum before compression: set dampening=0")
    if isinstance(optimizer, SupportsCorrectedGradients):
        optimizer.skip_momentum_of(corrected)
    elif len(corrected) < sum(len(plan.parameters) for plan in planned):
        warn(
            f"the memory applies momentum only to compressed parameters and {kind} has none: parameters that are "
            "exchanged dense get no momentum; use dgc.optim.DGCSGD to apply it"
        )


def share_momentum(
    optimizer: Optimizer, planned: Sequence[PlannedBucket], transport: Transport, factor: int
) -> None:
    """Bind the compressors that exchange the optimizer's momentum to it. Collective if there are any.

    Raises:
        ValueError: The optimizer has none to give, differs between ranks, or needs sums in place of means.
    """
    by_compressor: dict[ExchangesMomentum, dict[str, Tensor]] = {}
    for plan in planned:
        if isinstance(plan.compressor, ExchangesMomentum):
            names = (s.name for s in plan.bucket.segments)
            by_compressor.setdefault(plan.compressor, {}).update(zip(names, plan.parameters, strict=True))
    if not by_compressor:
        return
    groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    check_settings(transport, "optimizer", optimizer=optimizer, param_groups=groups)
    kind = " and ".join(sorted({type(compressor).__name__ for compressor in by_compressor}))
    if not isinstance(optimizer, MomentumOwner):
        raise ValueError(
            f"{kind} exchanges the momentum of the optimizer, and {type(optimizer).__name__} does not share its "
            "own: use dgc.optim.OneBitAdam or DGCAdam, or a compressor of gradients"
        )
    if factor != 1:
        raise ValueError(f"{kind} exchanges means of momentum: use op='average', and a learning rate for it")
    optimizer.receive_momentum_of([p for parameters in by_compressor.values() for p in parameters.values()])
    bound = {id(c): c.bound_to(optimizer, parameters) for c, parameters in by_compressor.items()}
    replace_compressors(planned, bound)
