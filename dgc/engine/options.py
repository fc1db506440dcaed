"""Checks and conversions of the arguments of all adapters."""

import gc
import math
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping, Sequence
from inspect import Parameter, signature
from numbers import Real
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from dgc.comm.meter import TrafficMeter
from dgc.comm.transport import CrossMachineTransport, Transport
from dgc.core.arguments import WHOLE, require
from dgc.core.bucket import as_real, named_pairs
from dgc.core.dense import CastCompressor, DenseCompressor
from dgc.core.protocol import Compressor, StatelessCompressor
from dgc.core.route import Route, Rule
from dgc.engine.buckets import PlannedBucket
from dgc.warn import warn

# what schedulers and torch add to parameter groups
OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "param_names"}
_optimizers_of: WeakKeyDictionary[Transport, int] = WeakKeyDictionary()
# of each parameter with hooks, what averages its gradients, and the name of that
_owners: MutableMapping[Tensor, tuple[ref[Any], str]] = WeakIdKeyDictionary()


def check_arguments(passes: int, predivide: float, num_groups: int, groups: Any) -> None:
    """Raise ValueError for unsupported arguments, and warn about arguments without effect."""
    require("a whole number of at least 1", WHOLE, least=1, backward_passes_per_step=passes)
    if predivide != 1.0:
        raise ValueError("gradient_predivide_factor is not supported: leave it at 1.0")
    if num_groups or groups is not None:
        warn("groups and num_groups have no effect here: use bucket_mb")


# wrappers of Lightning and of Accelerate, whose inner optimizer takes the steps
WRAPPERS = {"_FabricOptimizer", "LightningOptimizer", "AcceleratedOptimizer"}


def _inside(optimizer: Any) -> Any:
    """The optimizer that another one holds and steps, or None."""
    held = [vars(optimizer).get(name) for name in ("optimizer", "_optimizer", "inner")]
    return next((inner for inner in held if isinstance(inner, Optimizer)), None)


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the optimizer that holds the settings and the state, without a wrapper of Lightning or Accelerate.

    A wrapper may be an instance of the optimizer's own class, and have copies of its attributes: what is set there
    does not reach the optimizer.

    Raises:
        ValueError: It is no optimizer, or a wrapper of another kind.
    """
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, not {optimizer!r}")
    while (inner := _inside(optimizer)) is not None:
        if WRAPPERS.isdisjoint(kind.__name__ for kind in type(optimizer).__mro__):
            raise ValueError(
                f"{type(optimizer).__name__} steps another optimizer, {type(inner).__name__}, which has the "
                "settings and the state: pass that one"
            )
        optimizer = inner
    return optimizer


def check_steps(optimizer: Any, adapter: str) -> None:
    """Raise ValueError for an optimizer that `adapter` cannot step on gradients that it has prepared.

    adapter: The class that steps it.
    """
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, not {optimizer!r}")
    kind = type(optimizer).__name__
    if (inner := _inside(optimizer)) is not None:
        raise ValueError(
            f"{kind} steps another optimizer, {type(inner).__name__}, and may do more, such as unscale gradients "
            f"or leave steps out. {adapter} steps an optimizer itself: pass the {type(inner).__name__}"
        )


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer cannot step without a closure, which it then calls as often as it needs."""
    closure = signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is Parameter.empty


def check_needs_no_closure(optimizer: Optimizer, adapter: str) -> None:
    """Raise ValueError for an optimizer that evaluates the loss itself. adapter: The class that steps it."""
    if needs_closure(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} evaluates its closure several times in a step, and each rank would "
            f"decide by its own loss how often. {adapter} needs an optimizer that steps on given gradients"
        )


def name_parameters(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> list[tuple[str, Tensor]]:
    """Return (name, parameter) for each trainable parameter of the optimizer, once, in model order.

    Raises:
        ValueError: Two parameters have the same name, or a parameter of the optimizer has none.
    """
    owned = {
        p: f"group{g}.param{i}"
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    }
    if named_parameters is None:
        named = [(name, p) for p, name in owned.items()]
    else:
        unique = {p: name for name, p in reversed(named_pairs(named_parameters)) if p in owned}
        named = [(name, p) for p, name in reversed(unique.items())]
    check_has_values(named)
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"named_parameters has different parameters with the same name: {', '.join(twice)}")
    with_name = {p for _, p in named}
    unnamed = [name for p, name in owned.items() if p.requires_grad and p not in with_name]
    if unnamed:
        raise ValueError(f"named_parameters lacks {len(unnamed)} parameters of the optimizer: {unnamed[:5]}")
    return [(name, p) for name, p in named if p.requires_grad]


def check_not_sharded(named_parameters: Iterable[tuple[str, Tensor]], wrapper: str, cure: str) -> None:
    """Raise ValueError for a parameter of which each rank has another part, as of FSDP2 and of its predecessor.

    wrapper: the class that cannot exchange them. cure: what to do.
    """
    for name, p in named_parameters:
        if hasattr(p, "to_local"):
            raise ValueError(
                f"{name} is sharded: ranks have different parts of it, which {wrapper} would exchange as one and "
                f"the same: {cure}"
            )
        if getattr(p, "_fsdp_flattened", False):
            raise ValueError(
                f"{name} belongs to a FullyShardedDataParallel (FSDP1): ranks have different parts of it, which "
                f"{wrapper} would exchange as one and the same: use fully_shard (FSDP2) in its place, and {cure}"
            )


def check_has_values(named_parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError for a parameter that is only planned yet: on the device "meta", or of a lazy module."""
    for name, p in named_parameters:
        if is_lazy(p):
            raise ValueError(f"{name} has no shape yet, as its module is lazy: run a forward pass before")
        if p.is_meta:
            raise ValueError(f'{name} has no values yet, as it is on the device "meta": call to_empty() before')


_kind = attrgetter("dtype", "device", "shape")


class Layouts:
    """The types and memory orders of parameters, which must remain as they were planned."""

    def __init__(self, planned: Sequence[PlannedBucket]):
        self._planned = planned
        self._parameters = [p for plan in planned for p in plan.parameters]
        self._checked: object = None  # what was found right

    def check(self) -> None:
        """Raise RuntimeError for a parameter of another type, device or memory order than it was planned with.

        The hooks of DistributedDataParallel are not called for such a parameter, or do not get its gradient.
        """
        # by functions that run in C, because there may be hundreds of parameters
        present = list(map(_kind, self._parameters)), list(map(Tensor.stride, self._parameters))
        if present != self._checked:
            self._check_each()
            self._checked = present

    def _check_each(self) -> None:
        for plan in self._planned:
            for segment, p in zip(plan.bucket.segments, plan.parameters, strict=True):
                own = as_real(p.detach()) if p.is_complex() else p
                if own.dtype != plan.bucket.dtype or own.device != plan.bucket.device:
                    raise RuntimeError(
                        f"{segment.name} is {own.dtype} on {p.device}, and was planned as {plan.bucket.dtype} on "
                        f"{plan.bucket.device}: DistributedDataParallel then averages no gradient of it. Convert "
                        "or move the model (model.to) before DistributedDataParallel is built, or build it and "
                        "compress anew"
                    )
                if not (segment.orders(own) or isinstance(plan.compressor, StatelessCompressor)):
                    raise RuntimeError(
                        f"{segment.name} has another memory order than when DistributedDataParallel was built, "
                        "and the state of its compressor has the old one: convert the model (model.to) before, "
                        "or build both anew"
                    )


def ddp_of(parameters: Container[Tensor]) -> list[nn.parallel.DistributedDataParallel]:
    """The DistributedDataParallel modules with any of these parameters, found among all objects: ask once.

    Nothing else can find them. An optimizer knows parameters and no module. DDP leaves no mark on parameters or on
    the module inside, adds its hooks in C++, where Python cannot see them, and may be built at any time.
    """
    kinds: set[type] = {nn.parallel.DistributedDataParallel}
    while not kinds.issuperset(more := {sub for kind in kinds for sub in kind.__subclasses__()}):
        kinds |= more
    # not isinstance, which asks the objects, and they may do anything
    modules: list[Any] = [each for each in gc.get_objects() if type(each) in kinds]
    return [module for module in modules if any(p in parameters for p in module.parameters())]


def check_transport(transport: Any) -> None:
    """Raise ValueError for what is neither a transport nor None."""
    if transport is not None and not isinstance(transport, Transport):
        raise ValueError(f"transport must be what dgc.comm connects, or None, not {transport!r}")


def as_route(compression: Any) -> Route:
    """Convert the `compression` argument to a Route. Horovod's compressions are classes, all others instances.

    Raises:
        ValueError: It is none of these.
    """
    if isinstance(compression, Route):
        return compression
    if compression is None:
        return Route([Rule(DenseCompressor())])
    if isinstance(compression, type) and (hasattr(compression, "reduce") or issubclass(compression, Route)):
        name = compression.__name__
        raise ValueError(f"compression={name} is a class: pass an instance, compression={name}(...)")
    if hasattr(compression, "reduce"):
        return Route([Rule(compression)])
    if hasattr(compression, "compress") and hasattr(compression, "decompress"):
        return Route([Rule(CastCompressor(compression))])
    raise ValueError(f"compression must be a compressor, a Route or a Horovod compression, not {compression!r}")


def check_no_unfrozen(param_groups: Sequence[dict[str, Any]], known: Container[Tensor], wrapper: str) -> None:
    """Raise ValueError for a trainable parameter that is not known: each rank would train it alone.

    known: the parameters that were trainable when `wrapper` was built.
    """
    for g, group in enumerate(param_groups):
        for i, p in enumerate(group["params"]):
            if p.requires_grad and p not in known:
                raise ValueError(
                    f"parameter {i} of group {g}, of shape {tuple(p.shape)}, requires a gradient now but did "
                    f"not when {wrapper} was built, or was added since: close() it and wrap the optimizer again"
                )


def check_optimizer_state(optimizer: Optimizer, state: Any) -> None:
    """Raise ValueError unless `state` is a state of this kind of optimizer, with all that a step needs.

    Versions of torch add settings, and schedulers have theirs. Groups of another kind of optimizer differ in both
    directions.
    """
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise ValueError(f"state_dict must be what state_dict() returned, not {state!r}")
    groups, states = state["param_groups"], state["state"]
    if not isinstance(groups, Sequence) or not all(isinstance(group, Mapping) for group in groups):
        raise ValueError(f"param_groups of the optimizer's state must be a list of mappings, not {groups!r}")
    if not isinstance(states, Mapping) or not all(isinstance(own, Mapping) for own in states.values()):
        raise ValueError(f"state of the optimizer's state must have a mapping for each parameter, not {states!r}")
    for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        missing = sorted(optimizer.defaults.keys() - saved.keys())
        unknown = sorted(saved.keys() - own.keys() - OF_SCHEDULERS)
        if missing and unknown:
            raise ValueError(
                f"the state is from another optimizer than {type(optimizer).__name__}: it has {unknown} and "
                f"lacks {missing}. Load it into an optimizer of the class that saved it"
            )
    if isinstance(optimizer, ChecksStates):
        optimizer.check_state(state)


@runtime_checkable
class ChecksStates(Protocol):
    """An optimizer that refuses states which it could load, and not continue from."""

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError for a setting of a group that is out of range, and for what else is its own."""


def check_saved_groups(
    optimizer: Optimizer, state: Mapping[str, Any], check: Callable[[Mapping[str, Any]], None]
) -> None:
    """Raise ValueError, with the number of the group, if `check` refuses a group of a state.

    Settings that the state lacks, because another version of torch saved it, are taken from the optimizer.
    """
    for g, (own, saved) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=False)):
        try:
            check({**own, **saved})
        except ValueError as error:
            raise ValueError(f"group {g} of the optimizer's state cannot be loaded: {error}") from None


@runtime_checkable
class SharesSteps(Protocol):
    """An optimizer whose ranks, which have the same mean gradients, may each compute a part of a step for all.

    Attributes:
        owners: "on" if they do so for parameters that each rank has whole.
    """

    owners: str

    def use_transport(self, transport: Transport, meter: TrafficMeter) -> None:
        """Use the transport of an adapter, whose meter counts the bytes. Raises ValueError for other ranks."""


@runtime_checkable
class ConvertsStates(Protocol):
    """An optimizer that can go on from the state of another kind."""

    def converted(self, state: Any) -> Any:
        """Return such a state in the form of this optimizer's own, and all others as they are."""


def load_optimizer_state(optimizer: Optimizer, state: Any) -> None:
    """Load the state of an optimizer. Raises ValueError for a state of another kind, and for a damaged one."""
    if isinstance(optimizer, ConvertsStates):
        state = optimizer.converted(state)
    check_optimizer_state(optimizer, state)
    try:
        optimizer.load_state_dict(state)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the state of the optimizer is damaged, or from other parameters: {type(optimizer).__name__} "
            f"refuses it with {type(error).__name__}: {error}"
        ) from error


def check_adam(betas: Any, floor: Any, **rates: Any) -> None:
    """Raise ValueError if an argument of an Adam is out of range. rates: see `check_rates`."""
    check_rates(**rates)
    is_pair = isinstance(betas, Sequence) and len(betas) == 2
    if not is_pair or not all(0 <= as_number(beta) < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers from 0 to below 1, not {betas!r}")
    if not 0 <= as_number(floor) <= 1:
        raise ValueError(f"floor must be a fraction from 0 to 1, not {floor!r}")


def check_rates(**rates: Any) -> None:
    """Raise ValueError for a learning rate, or another number by its name, that is negative or not finite."""
    for name, value in rates.items():
        if not 0 <= as_number(value) < math.inf:
            raise ValueError(f"{name} must be a finite number of 0 or more, not {value!r}")


def as_number(value: Any) -> float:
    """The number that a setting is, also as a tensor of one element, which torch's optimizers take. NaN: none."""
    if isinstance(value, Tensor):
        return math.nan if value.numel() != 1 or value.is_complex() else float(value)
    return math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return the loss of the closure of an optimizer's step, evaluated with gradients. None without a closure.

    Raises:
        ValueError: It is not a function.
    """
    if closure is None:
        return None
    require("a function", (Callable,), closure=closure)
    with torch.enable_grad():
        return closure()


def reduction_factor(op: Any, size: int) -> int:
    """Return the factor that turns the mean over ranks into `op`. Accepts Horovod's constants Average and Sum."""
    name = {"0": "average", "1": "sum"}.get(str(op), str(op)).lower()
    if name in ("average", "mean"):
        return 1
    if name == "sum":
        return size
    raise ValueError(f"op must be 'average' or 'sum', not {op!r}")


def unique_prefix(transport: Transport) -> str:
    """Return a name prefix, unique on this transport. All ranks must create their optimizers in the same order."""
    if isinstance(transport, CrossMachineTransport):
        return unique_prefix(transport.inner)
    _optimizers_of[transport] = number = _optimizers_of.get(transport, -1) + 1
    return f"dgc{number}"


def claim(parameters: Iterable[Tensor], owner: Any, name: str) -> None:
    """Record that `owner`, while it exists, averages these gradients. name: "DistributedOptimizer" or "DDP"."""
    _owners.update((p, (ref(owner), name)) for p in parameters)


def release(parameters: Iterable[Tensor]) -> None:
    """Forget what averages these gradients."""
    for p in parameters:
        _owners.pop(p, None)


def check_not_wrapped(named_parameters: Iterable[tuple[str, Tensor]], name: str) -> None:
    """Raise ValueError if something else averages the gradients of these parameters: they would be averaged twice.

    name: what is to average them, as in `claim`. A new DistributedDataParallel may replace an earlier one.
    """
    for parameter, p in named_parameters:
        owner, other = _owners.get(p, (lambda: None, ""))
        if owner() is None or name == other == "DDP":
            continue
        if other == "DDP":
            raise ValueError(
                f"dgc.ddp.compress exchanges the gradient of {parameter} already: step the optimizer itself, "
                "without DistributedOptimizer, or delete the model in DistributedDataParallel first"
            )
        raise ValueError(
            f"{parameter} belongs to another DistributedOptimizer already: close() that one before wrapping its "
            "parameters again"
        )


def check_can_send(compressors: Iterable[Compressor], transport: Transport) -> None:
    """Raise ValueError if a compressor sends messages from rank to rank, and the transport cannot carry them."""
    for compressor in compressors:
        if compressor.point_to_point and not transport.point_to_point:
            raise ValueError(
                f"{type(compressor).__name__} sends messages from rank to rank, and this "
                f"{type(transport).__name__} does not: connect with point_to_point=True"
            )
