"""LocalOptimizer: each rank steps on its own gradients, and ranks exchange models (`dgc.gossip`, `dgc.local`)."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isnan
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.comm.collectives import all_gather_object, all_reduce, barrier
from dgc.comm.connect import default_transport, running_transports
from dgc.comm.conversation import Intact, without_autocast
from dgc.comm.meter import TrafficMeter
from dgc.comm.transport import CrossMachineTransport, Transport
from dgc.core.bucket import local_part
from dgc.core.results import NonFiniteGradientError
from dgc.core.state import with_tensors
from dgc.engine.agreement import check_settings, checksum
from dgc.engine.buckets import check_equal_plans
from dgc.engine.drops import DropPolicy, check_nonfinite
from dgc.engine.gathered import HasGatheredState
from dgc.engine.momentum import warn_of_unsuited
from dgc.engine.options import (
    SharesSteps,
    check_no_unfrozen,
    check_not_sharded,
    check_optimizer_state,
    check_steps,
    check_transport,
    ddp_of,
    load_optimizer_state,
    loss_of,
    name_parameters,
    needs_closure,
    unique_prefix,
)
from dgc.engine.state import check_is_state, identity_of
from dgc.engine.steps import before_steps, check_not_running
from dgc.gossip.model import FlatModel
from dgc.gossip.protocol import Gossip, JoinsGroups, UsesOptimizer
from dgc.optim.wrapper import Wrapper
from dgc.warn import warn

BUFFER = "momentum_buffer"  # what torch calls the momentum of SGD and Muon
OF_ANOTHER_RANK = "a gradient on another rank of this machine has NaN or inf"  # and that rank has the reason
MAX_STEP_LAG = 16  # in an exponential graph of 2**16 ranks a slow rank delays all others after 16 steps


_wrapper_of: MutableMapping[Optimizer, Any] = WeakKeyDictionary()  # of each optimizer, the last one's reference


class LocalOptimizer(Wrapper):
    """Wraps a torch optimizer for ranks that step on their own gradients and exchange models.

    Parameters and optimizer state differ between ranks. The model of the run is the mean of the parameters, which
    `consensus` loads. All ranks must start with the same parameters: see broadcast_parameters. Weights may be
    loaded until the first zero_grad(), also after this optimizer was built. A later change, such as a limit of
    their norm, counts as progress of this rank. With a torch.amp.GradScaler call `scaler.step(optimizer)`. Each
    rank has its own scale.

    Args:
        optimizer: The optimizer to wrap.
        named_parameters: `model.named_parameters()`. None: names are made from groups and positions.
        method: How models are exchanged: an algorithm of `dgc.gossip` or `dgc.local`.
        transport: Connects the ranks. None: see `dgc.init`. With Horovod, MPI carries messages of two ranks.
        nonfinite: Response to NaN or inf in this rank's gradient. Its step is dropped and counted in
            `dropped_steps`; other ranks are not affected, except the ranks of its machine that take steps with it.
            "raise" then raises NonFiniteGradientError, unless it is a GradScaler that has found it. Training may
            go on.
        groups: `dgc.groups.connect(address)`: the ranks of `transport` are one group, which meets other groups in
            its outer steps. Groups may come and go.

    Raises:
        ValueError: An argument is invalid, or settings or models differ between ranks, which the first step checks
            again.

    Example:
        optimizer = LocalOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), SGP())
        optimizer.zero_grad()  # also adds messages of neighbours: call it before each forward pass
        loss_fn(model(inputs)).backward()  # repeat to accumulate gradients
        optimizer.step()
    """

    _step_supports_amp_scaling = True  # GradScaler then leaves the check for inf to step()
    _worker = "rank"  # what has one model, for messages

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        method: Gossip,
        *,
        transport: Transport | None = None,
        nonfinite: str = "skip",
        groups: JoinsGroups | None = None,
    ):
        check_nonfinite(nonfinite, None)
        check_steps(optimizer, type(self).__name__)
        check_method(method)
        settings, method = method, method if groups is None else groups.method(method)
        check_transport(transport)
        if isinstance(optimizer, SharesSteps) and optimizer.owners == "on":
            raise ValueError(
                f'owners="on" gives the step of one rank to others, and with {type(self).__name__} each '
                f'{self._worker} steps on its own gradients: use owners="auto"'
            )
        self.transport, self.groups = transport or default_transport(point_to_point=True), groups
        # all ranks of the run, by whose numbers messages name them
        ranks = transport.inner if isinstance(transport, CrossMachineTransport) else self.transport
        self.inner, self._original = optimizer, ref(self)
        drops = DropPolicy(nonfinite, f"this {self._worker} drops its step")
        HasGatheredState.__init__(self, [method], ranks, None, drops)
        self._is_stepping, self._end_checks = False, before_steps(self._check_inner_step)
        _wrapper_of[optimizer] = self._original
        self._takes_common_steps = method.is_synchronous
        self.max_step_lag = MAX_STEP_LAG if method.is_synchronous else None
        self.method = method
        # HierarchicalGossip's algorithm between machines counts these as its ranks
        self.meter = TrafficMeter(1 if method.needs_groups else self.transport.local_size)
        self._intact = Intact()
        self.consensus_distance = float("nan")
        named = name_parameters(optimizer, named_parameters)
        if not self._is_sharded:
            check_not_sharded(named, "LocalOptimizer", "use dgc.fsdp.ShardedLocalOptimizer")
        if not method.needs_groups and ranks.rank == 0:
            warn_of_ddp({p for _, p in named})
        check_settings(ranks, "local.settings", nonfinite=nonfinite, method=settings)
        check_equal_plans([(name, tuple(p.shape), str(p.dtype)) for name, p in named], ranks)
        self._momenta = Momenta(optimizer, named) if method.averages_momentum else None
        self.model = FlatModel(named, () if self._momenta is None else self._momenta.named)
        self._trained = {p for _, p in named}
        self._shares_steps = method.needs_groups or self._is_sharded
        if self._shares_steps and needs_closure(optimizer):
            raise ValueError(self._no_closures())
        self._begins, self._is_settled = True, False  # until a step or a loaded state; until the next step
        self._start: Tensor | None = None  # this rank's model before the first forward pass
        self._loaded: int | None = None  # digest of the parameters that a state has brought
        self._is_replaced = False  # whether they were changed before they were used
        if isinstance(method, UsesOptimizer):
            method.use_optimizer(optimizer)
        method.start(self.model, self.transport, self.meter, f"{unique_prefix(self.transport)}.local")
        if method.compression is not None:
            compressors = {p: method.compression.compressor_for(segment) for p, segment in self.model.pairs()}
            warn_of_unsuited(optimizer, compressors, ranks, of_gradients=False)
        self.replica_group = method.replica_group
        if not method.is_synchronous:  # a rank could train alone, and end, before the others are connected to it
            barrier(self.transport, "local.started")

    # --- one step ---------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients and add the messages of neighbours. Call it before the forward pass of each step."""
        self.inner.zero_grad(set_to_none)
        if self._is_stepping:  # in a closure
            return
        self._gather()
        if self._begins and self.method.keeps_start:
            self._start = self.model.z.clone()
        self._timed("wait", self.method.begin_step)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, alone or with an exchange. closure: As of the wrapped optimizer, called at least once.

        Raises:
            NonFiniteGradientError: Gradients are not finite. Of a closure these are the ones of its first call.
        """
        if self._original() is not self:
            self._refuse_copy()
        if closure is None and needs_closure(self.inner):
            raise ValueError(f"{type(self.inner).__name__} computes the loss in its step: call step(closure)")
        loss = loss_of(closure)
        check_no_unfrozen(self.param_groups, self._trained, type(self).__name__)
        of_groups = 1 if self.groups is None else self.groups.size
        self.meter.count_dense(self.model.numel, self.transport.size * of_groups)
        # both are collective in the first step: before what may raise an error on some ranks only
        self._settle()
        self._begin_step()
        self._begins = False
        reason, by_scaler = self._nonfinite(), getattr(self, "found_inf", None) is not None
        step = partial(self._step, closure, loss) if reason is None else lambda: None
        with self._stepping():
            self._timed("step", lambda: self.method.update(step, float(self.param_groups[0]["lr"])))
        if reason is None and self.method.has_skipped:
            reason = OF_ANOTHER_RANK
        # after the exchange, in which other ranks wait for this one: a warning may be an error
        if reason is not None and self._drops.drop(reason, by_scaler=by_scaler, warns=reason != OF_ANOTHER_RANK):
            raise NonFiniteGradientError(reason)
        return loss

    def _step(self, closure: Callable[[], Any] | None, loss: Any) -> None:
        if self._momenta is not None:
            self._momenta.attach()  # if a state was loaded
        self.inner.step() if closure is None else self.inner.step(self._from_second_call(closure, loss))
        if self._momenta is not None:
            self._momenta.attach()

    def _from_second_call(self, closure: Callable[[], Any], loss: Any) -> Callable[[], Any]:
        """The closure, whose first call has been made already and returned `loss`."""
        known = [loss]

        def evaluate() -> Any:
            if known:
                return known.pop()
            if self._shares_steps:
                raise ValueError(self._no_closures())
            return closure()

        return evaluate

    def _no_closures(self) -> str:
        return (
            f"{type(self.inner).__name__} computes the loss several times in a step, as often as its own rank "
            "needs, and the ranks of a machine take one step together: use another optimizer, or LocalOptimizer "
            "without HierarchicalGossip and FSDP2"
        )

    def _gather(self) -> None:
        """Take over what was changed in the parameters, before messages change them."""
        self.model.gather()
        if self._loaded is not None:
            self._is_replaced, self._loaded = self._digest_of_parameters() != self._loaded, None

    def _digest_of_parameters(self) -> int:
        return checksum(self.model.z[: self.model.numel])

    def _settle(self) -> None:
        """Before the first step, or the first one after a load: begin from the weights that the ranks have now.

        Raises:
            ValueError: The ranks have different ones, or a rank has others than in the state that it loaded.
                Raised on every rank.
        """
        if self._is_settled:
            return
        start, self._start, self._loaded = self._start, None, None
        if self._takes_common_steps:
            if start is None:
                self.model.gather()
                start = self.model.z
            shard = self._ranks.group_rank("local") if self._is_sharded else 0
            digest = checksum(start) if self._begins and self.method.keeps_start else None
            found = all_gather_object(self._ranks, (shard, digest, self._is_replaced), "local.start")
            self._compare_starts(found)
            if digest is not None and all((shard, digest) == one[:2] for one in found if one[0] == shard):
                self.method.begin_from(start)
        self._is_settled = True

    def _compare_starts(self, found: Sequence[tuple[int, int | None, bool]]) -> None:
        """found: of each rank its shard, the digest of its start, and whether its parameters were replaced."""
        first_seen: dict[int, tuple[int, int]] = {}
        for rank, (shard, digest, is_replaced) in enumerate(found):
            if is_replaced:
                raise ValueError(
                    f"the parameters of rank {rank} were changed after load_compression_state_dict(), which loads "
                    "this rank's model: load other weights before it"
                )
            if digest is None:
                continue
            other, expected = first_seen.setdefault(shard, (rank, digest))
            if digest != expected and self.method.needs_common_start:
                raise ValueError(
                    f"rank {rank} has another model at the first step than rank {other}: load the same weights on "
                    "every rank, or call dgc.optim.broadcast_parameters(model.state_dict()), because ranks "
                    "exchange only changes"
                )

    def _timed(self, phase: str, work: Callable[[], object]) -> None:
        before, start = dict(self.meter.seconds), perf_counter()
        with self._intact, without_autocast():
            work()
        # time that a conversation has already counted is subtracted
        counted = sum(self.meter.seconds[name] - before[name] for name in before)
        self.meter.seconds[phase] += max(0.0, perf_counter() - start - counted)

    def _nonfinite(self) -> str | None:
        """Why this rank drops its step, or None: its gradients are finite.

        If a GradScaler has scaled them, they are unscaled first.
        """
        owned = [(segment.name, local_part(p.grad)) for p, segment in self.model.pairs() if p.grad is not None]
        if not owned:
            return None
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            torch._foreach_mul_([gradient for _, gradient in owned], float(1 / scale.double()))
        if found_inf is not None:
            return "the GradScaler has found inf" if float(found_inf) else None
        every = [(name, g.coalesce().values() if g.is_sparse else g) for name, g in owned]
        named = [(name, values) for name, values in every if values.numel()]
        if not named:
            return None
        # sums take a tenth of the time of a look at each element, but may overflow
        sums = torch.stack([values.sum(dtype=torch.float32) for _, values in named])
        if bool(sums.isfinite().all()):
            return None
        nonfinite = next((name for name, values in named if not bool(values.isfinite().all())), None)
        return (
            None if nonfinite is None else f"the gradient of {nonfinite} on rank {self._ranks.rank} has NaN or inf"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's optimizer."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._check_optimizer(state_dict)
        super().load_state_dict(state_dict)
        if self._momenta is not None:  # a state that is saved before the next step has them too
            self._momenta.attach()
            self.model.gather()

    def _set_epoch(self, epoch: int) -> None:
        self._gather()  # some algorithms then complete what is in flight
        super()._set_epoch(epoch)

    def _check_inner_step(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if the wrapped optimizer is stepped in place of this one."""
        if optimizer is self.inner and not self._is_stepping and _wrapper_of.get(optimizer) is self._original:
            own, kind = type(self).__name__, type(optimizer).__name__
            raise RuntimeError(
                f"step() of the {kind} in a {own}, without which no models are exchanged: step the {own}, or "
                f"close() it before you step the {kind} alone"
            )

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Context in which the wrapped optimizer is stepped."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    # --- the common model -------------------------------------------------------------------------

    def more_steps(self, total: int) -> Callable[[], bool] | None:
        if self.method.is_synchronous:
            return None
        return lambda: self.method.progress < total

    def synchronize_messages(self) -> None:
        self._intact.check()
        self._gather()
        self.method.synchronize_messages()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Context in which every rank's parameters are the mean over all ranks, with all messages in flight.

        Sets `consensus_distance`, the L2 distance of this rank's parameters from the mean. Collective.
        """
        self._intact.check()
        self._gather()
        self.method.flush()
        z = self.model.z
        mean = all_reduce(self.transport, self.method.biased_parameters(), "mean", "consensus")
        own = z.clone()
        self.consensus_distance = float((own - mean)[: self.model.numel].norm())
        with torch.no_grad():
            z.copy_(mean)
        self.model.scatter()
        try:
            yield
        finally:
            with torch.no_grad():
                z.copy_(own)
            self.model.scatter()

    def metrics(self) -> dict[str, float]:
        measured = {} if isnan(self.consensus_distance) else {"consensus_distance": self.consensus_distance}
        return {**self.method.metrics(), **measured}

    def close(self) -> None:
        """Receive all messages in flight, then stop sending and receiving. Collective.

        Call it before the program ends. When the first rank exits, Horovod ends MPI on all ranks.
        """
        if self.method.is_running:
            self.synchronize_messages()
        self.method.close()
        self._end_checks()
        barrier(self.transport, "local.closed")

    def join(self) -> None:
        if self.replica_group is None:
            super().join()
        self._gather()
        self.method.join()

    def compression_state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's model, algorithm state and optimizer state, for a checkpoint. Collective.

        Of a sharded model they are plain tensors, this rank's shards.
        """
        self._check_idle("compression_state_dict()")
        self._gather()
        self.method.flush()
        own = with_tensors(lambda tensor: local_part(tensor).clone(), self.state_dict())
        return {**super().compression_state_dict(), "optimizer": own}

    def _check_idle(self, call: str) -> None:
        self._intact.check()
        check_not_running(call, self._intact.is_entered)

    def load_compression_state_dict(self, state: dict[str, Any], *, allow_other_rank: bool = False) -> None:
        check_is_state(state)
        algorithm = dict(state)
        if "optimizer" not in algorithm:
            raise ValueError("the state is not from a LocalOptimizer: it has no optimizer state of this rank")
        optimizer = with_tensors(torch.clone, algorithm.pop("optimizer"))  # torch's optimizers keep the tensors
        self._check_optimizer(optimizer)
        # first, because only torch can say whether it takes it
        with unchanged_on_error(self.inner):
            self._load_optimizer(optimizer)
            super().load_compression_state_dict(algorithm, allow_other_rank=allow_other_rank)
        if self._momenta is not None:
            self._momenta.attach(loads=False)  # the algorithm has loaded them
        self._begins = identity_of(state).step == 0  # the ranks may still begin from other weights
        self._loaded = None if self._begins else self._digest_of_parameters()
        self._is_settled = self._is_replaced = False
        self._start = None

    def _check_optimizer(self, state: Any) -> None:
        """Raise ValueError for a state that this rank's optimizer cannot have saved."""
        check_optimizer_state(self.inner, state)
        check_tensors(self.inner, state)
        if self._momenta is not None:
            self._momenta.check_state(state)

    def _load_optimizer(self, state: Any) -> None:
        load_optimizer_state(self.inner, state)

    def __repr__(self) -> str:
        return f"LocalOptimizer({self.inner!r}, {type(self.method).__name__}, size={self.transport.size})"


class Momenta:
    """The momenta of an optimizer's parameters, as tensors that stay where they are when a state is loaded.

    Args:
        optimizer: SGD or Muon, or another optimizer that keeps a `momentum_buffer` and nothing else.
        named: (name, parameter) pairs.

    Attributes:
        named: (name, momentum) pairs: the optimizer's momenta, or zeros before its first step.
    """

    def __init__(self, optimizer: Optimizer, named: Sequence[tuple[str, Tensor]]):
        self._optimizer, names = optimizer, {p: name for name, p in named}
        self._parts = [
            (names[p], p, torch.zeros_like(p.detach()))
            for group in optimizer.param_groups
            if group.get("momentum")
            for p in group["params"]
            if p in names
        ]
        if not self._parts:
            raise ValueError(
                f"average_momentum needs the momentum of SGD or Muon, and {type(optimizer).__name__} has none: "
                "set its momentum, or leave average_momentum out"
            )
        self.named = [(f"{name}.momentum", momentum) for name, _, momentum in self._parts]
        self.attach()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError for a state of the optimizer that has more than momenta."""
        names = {p: name for name, p, _ in self._parts}
        for group, saved in zip(self._optimizer.param_groups, state["param_groups"], strict=False):
            for p, i in zip(group["params"], saved.get("params", ()), strict=False):
                if p in names:
                    self._check_keys(names[p], state["state"].get(i, {}))

    def _check_keys(self, name: str, state: Mapping[str, Any]) -> None:
        if state.keys() - {BUFFER}:
            raise ValueError(
                f"average_momentum needs an optimizer that keeps a {BUFFER} and nothing else, such as SGD or "
                f"Muon: {type(self._optimizer).__name__} keeps {sorted(state)} of {name}"
            )

    @torch.no_grad()
    def attach(self, loads: bool = True) -> None:
        """Let the optimizer use these tensors. loads: with the values of those that it has made or loaded.

        A parameter on which this rank has not stepped gets the momentum of those that have.
        """
        for name, p, momentum in self._parts:
            state = self._optimizer.state.get(p) or {}
            if state.get(BUFFER) is momentum:
                continue
            self._check_keys(name, state)
            if state.get(BUFFER) is None:
                # zeros would change the first step of an SGD with dampening; without a gradient there is no step
                if p.grad is not None and local_part(momentum).any():
                    self._optimizer.state[p][BUFFER] = momentum
                continue
            if loads:
                local_part(momentum).copy_(local_part(state[BUFFER]))
            state[BUFFER] = momentum


def warn_of_ddp(parameters: Container[Tensor]) -> None:
    """Warn if DistributedDataParallel averages gradients on which each rank should step alone."""
    if "torch" not in running_transports():
        return
    for module in ddp_of(parameters):
        size = module.process_group.size()
        if size > 1:
            warn(
                f"the model is in DistributedDataParallel, which averages the gradients of {size} ranks in every "
                "step: exchanging models in place of gradients then saves nothing. Train the module without it, "
                "or in its no_sync()"
            )


def check_tensors(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise ValueError for tensors that an optimizer cannot have kept: not finite, or of other parameters."""
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for p, i in zip(group["params"], saved.get("params", ()), strict=False):
            for key, value in state["state"].get(i, {}).items():
                if not isinstance(value, Tensor) or not value.dim():
                    continue
                what, own, part = (
                    f"{key} of parameter {i} of the optimizer's state",
                    local_part(p),
                    local_part(value),
                )
                fits = part.shape == own.shape
                if key != BUFFER and not fits:  # factored moments have dimensions of size 1
                    sizes = zip(part.shape, own.shape, strict=False)
                    fits = part.dim() != own.dim() or all(a in (1, b) for a, b in sizes)
                if not fits:
                    raise ValueError(f"{what} has shape {tuple(part.shape)}, and the parameter {tuple(own.shape)}")
                if not bool(part.isfinite().all()):
                    raise ValueError(f"{what} has NaN or inf")


@contextmanager
def unchanged_on_error(optimizer: Optimizer) -> Iterator[None]:
    """Context in which a state is loaded, and after an error the one before is back."""
    before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    try:
        yield
    except BaseException:
        vars(optimizer).update(before)  # torch replaces both
        raise


def check_method(method: Any) -> None:
    """Raise ValueError if `method` is no algorithm that exchanges models."""
    if isinstance(method, type) or not isinstance(method, Gossip):
        raise ValueError(f"method must be an algorithm such as dgc.gossip.SGP(), not {method!r}")
