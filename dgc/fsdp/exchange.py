"""Compression of a model that FSDP2 shards or replicates: the exchange of its gradients between replicas.

    mesh = init_device_mesh("cuda", (machines, ranks), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)  # and each layer before; or replicate(model)
    exchange = compress(model, DGCCompressor(0.01, DGCSGDMemory(momentum=0.9)))
    optimizer = DGCSGD(model.parameters(), lr=0.1, momentum=0.9)

With M replicas of L shards, rank (m, l) has shard l of every parameter. For each parameter group, backward does

    reduce-scatter   g = mean over the L ranks of replica m, of shard l       by FSDP2, at full precision
    all-reduce hook  mean over the M replicas of g, compressed                among the ranks with shard l

The result is the mean over all M L ranks. With `set_gradient_divide_factor(f)` it is their sum / f: g is then the
sum over the L ranks, times M / f. The hook takes the gradients out of FSDP2 and leaves zeros. The means are added
to .grad when backward ends, so that a gradient that is not finite can drop all of them. A group's exchange starts
in its hook, once all groups before it have started. The first backward pass counts how often each group is
reduced, and starts all exchanges at its end.

L and M are those of the group's mesh. Groups on several meshes, as experts have them, are exchanged on several
transports, in one order on all ranks. `replicate` has L = 1. A group that is sharded over all ranks has M = 1:
its gradient only takes part in the decision to drop a step. Without such meshes, machines are the replicas: with
`fully_shard(model, mesh=local_mesh(transport))`, M and L are their number and size, which `transport=` describes.

After an exception in backward, the next pass begins again without the gradients that were taken since the last
exchange, if no group has started. Otherwise it raises RuntimeError, because ranks may have started other groups.
FSDP2 itself continues only after `reset_iter_state()`.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dgc.comm.collectives import all_gather_object, all_reduce, barrier
from dgc.comm.meter import TrafficMeter
from dgc.comm.requests import Group
from dgc.comm.torch_distributed import close, connect
from dgc.comm.transport import CrossMachineTransport, Groups, Transport
from dgc.core.bucket import Bucket, Segment, check_real, lay_out, local_part
from dgc.core.dense import DenseCompressor, HorovodCompression
from dgc.core.protocol import Compressor, ExchangesMomentum
from dgc.core.results import NonFiniteGradientError
from dgc.core.route import Route
from dgc.core.state import check_mapping
from dgc.engine.agreement import checksum
from dgc.engine.buckets import PlannedBucket, check_equal_plans, keep_states
from dgc.engine.exchange import ExchangeSettings, GradientExchange, GradientPlan
from dgc.engine.loop import LossScale, StartOrder
from dgc.engine.momentum import MomentumCheck
from dgc.engine.options import check_can_send, unique_prefix
from dgc.engine.redistribute import blend, merge, shares
from dgc.engine.state import KEY, METHOD, Identity, identified, identity_of, named_methods
from dgc.engine.steps import AwaitedStep, before_steps
from dgc.fsdp.shards import (
    GroupMesh,
    ParameterGroup,
    Place,
    check_all_exchanged,
    check_ended,
    check_ranks,
    check_shards,
    machines,
    parameter_groups,
    raise_not_exchanged,
    sharded_like,
)


@dataclass(frozen=True, eq=False)
class Replicas:
    """The ranks between which the groups of one mesh are exchanged.

    Attributes:
        transport: Connects them alone.
        lists: The ranks that have the same shards: those of this rank, and of the other ranks.
        are_exchanged: Whether the mesh has replicas, though it may be one.
        kind: What they are, in a word.
    """

    transport: Transport
    lists: Sequence[Sequence[int]]
    are_exchanged: bool = True
    kind: str = "replica"


def replicas_of_machines(transport: Transport, groups: Sequence[ParameterGroup]) -> Replicas:
    """The machines. Raises ValueError if groups are not sharded over the ranks of each. Collective."""
    check_ranks(transport)
    ranks = machines(transport)
    check_shards(groups, ranks[transport.group_rank("cross")])
    cross = CrossMachineTransport(transport)
    barrier(cross, "groups")  # raises ValueError if the transport has none
    return Replicas(cross, list(zip(*ranks, strict=True)), kind="machine")


def replicas_of_meshes(groups: Sequence[ParameterGroup]) -> tuple[list[Transport], dict[GroupMesh, Replicas]]:
    """The replicas of each mesh, and a new transport of all ranks for each, with the mesh's groups. Collective.

    Raises:
        ValueError: The meshes have no replicas, or differ between ranks.
    """
    own = list(dict.fromkeys(group.mesh for group in groups))
    own.sort(key=lambda mesh: mesh.replicas is None)  # a stable order, with replicas first
    if own[0].replicas is None:
        raise ValueError(
            f"the mesh of {groups[0].label} has no replicas, between which gradients would be exchanged: call "
            "fully_shard with a mesh of two dimensions, or replicate, or dgc.fsdp.quantize for a model that is "
            "sharded over all ranks. With local_mesh(transport) pass transport="
        )
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [(mesh.shards, mesh.replicas or (dist.get_rank(),)) for mesh in own])
    if len({len(meshes) for meshes in found}) > 1:
        raise ValueError(f"the model has {sorted({len(meshes) for meshes in found})} meshes on different ranks")
    transports, of_mesh = list[Transport](), dict[GroupMesh, Replicas]()
    for mesh, of_ranks in zip(own, zip(*found, strict=True), strict=True):
        shards, lists = ([list(ranks) for ranks in dict.fromkeys(kind)] for kind in zip(*of_ranks, strict=True))
        transports.append(connect(hierarchical=True, groups=Groups(dist.get_rank(), shards, lists)))
        of_mesh[mesh] = Replicas(CrossMachineTransport(transports[-1]), lists, mesh.replicas is not None)
    return transports, of_mesh


@dataclass(eq=False)
class GroupPlan:
    """A parameter group and the buckets of its shards, one for each compressor.

    Attributes:
        replicas: The ranks between which the group is exchanged.
        compressors: The compressor of each parameter.
        buckets: Parameters of which this rank has no rows are in none.
        places: For each bucket, the places of its parameters in the result of the reduce-scatter.
        rowless: The parameters of which this rank has no rows, in buckets without elements.
        has_gradients: Whether the buckets have gradients of this or an earlier backward pass.
    """

    group: ParameterGroup
    replicas: "Replicas"
    compressors: tuple[Compressor, ...]
    buckets: tuple[PlannedBucket, ...]
    places: tuple[tuple[Place, ...], ...]
    rowless: tuple[PlannedBucket, ...] = ()
    has_gradients: bool = False

    @property
    def named(self) -> list[tuple[str, DTensor]]:
        return list(zip(self.group.names, self.group.parameters, strict=True))

    def add(self, output: Tensor, scale: float = 1.0) -> None:
        """Add the result of a reduce-scatter, times `scale`, to the gradients in the buckets."""
        self.fill()
        for planned, places in zip(self.buckets, self.places, strict=True):
            flat = planned.bucket.flat
            for segment, place in zip(planned.bucket.segments, places, strict=True):
                flat[segment.offset : segment.offset + segment.numel].add_(place.rows_of(output), alpha=scale)
        self.has_gradients = True

    def fill(self) -> None:
        """Fill the buckets with zeros if no backward pass has used the group."""
        if not self.has_gradients:
            for planned in self.buckets:
                planned.bucket.flat.zero_()

    def deliver(self) -> None:
        """Add the content of the buckets to .grad. It is replaced by the next gradients."""
        self.has_gradients = False
        for planned in self.buckets:
            for segment, p in zip(planned.bucket.segments, planned.parameters, strict=True):
                gradient = segment.of(planned.bucket.flat)
                assert isinstance(p, DTensor)
                if p.grad is None:  # no backward pass has used the parameter's group yet
                    p.grad = sharded_like(p, gradient.to(local_part(p).device, copy=True))
                else:
                    local_part(p.grad).add_(gradient.to(local_part(p.grad).device))
        for p in self.group.parameters:
            if p.grad is None:  # this rank has no rows of it, and others have its gradient
                p.grad = sharded_like(p, torch.zeros_like(local_part(p)))


def plan_groups(
    groups: Sequence[ParameterGroup], replicas_of: Mapping[GroupMesh, Replicas], route: Route, prefix: str
) -> list[GroupPlan]:
    """Plan the buckets of each group, in the order of their exchange.

    A parameter's compressor depends on the whole parameter, so that all ranks choose the same. What a mesh without
    replicas does not exchange stays as it is.
    """
    plans, alone = [], DenseCompressor()
    for g, group in enumerate(groups):
        replicas = replicas_of[group.mesh]
        compressors = []
        for name, p in zip(group.names, group.parameters, strict=True):
            check_real(name, p.dtype)
            whole = Segment(name, 0, p.numel(), tuple(p.shape), tuple(p.stride()))
            compressors.append(route.compressor_for(whole) if replicas.are_exchanged else alone)
        buckets, places, rowless = [], [], []
        for c, compressor in enumerate(dict.fromkeys(compressors)):
            members = [
                (name, p, place)
                for name, p, place, own in zip(
                    group.names, group.parameters, group.places, compressors, strict=True
                )
                if own is compressor and p.to_local().numel()
            ]
            without = tuple(
                p
                for p, own in zip(group.parameters, compressors, strict=True)
                if own is compressor and not p.to_local().numel()
            )
            if without:
                empty = Bucket(f"{prefix}.{g}.{c}.rowless", (), without[0].dtype, group.device)
                rowless.append(PlannedBucket(empty, compressor, without))
            if members:
                segments = lay_out([(name, p.to_local()) for name, p, _ in members])
                bucket = Bucket(f"{prefix}.{g}.{c}", segments, members[0][1].dtype, group.device)
                parameters = tuple(p for _, p, _ in members)
                buckets.append(PlannedBucket(bucket, compressor, parameters, transport=replicas.transport))
                places.append(tuple(place for _, _, place in members))
        plans.append(GroupPlan(group, replicas, tuple(compressors), tuple(buckets), tuple(places), tuple(rowless)))
    return plans


def check_equal_models(plans: Sequence[GroupPlan], transport: Transport, name: str) -> None:
    """Raise ValueError on every rank if a parameter differs between replicas. Collective."""
    named = [pair for plan in plans for pair in plan.named]
    digests = all_gather_object(transport, {n: checksum(p.to_local()) for n, p in named}, name)
    for plan in plans:
        for first, *others in plan.replicas.lists:
            for number, other in enumerate(others, 1):
                for parameter in plan.group.names:
                    if digests[other][parameter] != digests[first][parameter]:
                        raise ValueError(
                            f"{parameter} differs between {plan.replicas.kind}s 0 and {number} before the first "
                            "step: initialise the model with the same seed on every rank, or load a checkpoint"
                        )


ROWS, RANKS, COMMON, REPLICAS = "rows", "ranks", "common", "replicas"


def packed(value: Any) -> bytes:
    """Return the bytes of a state."""
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


def unpacked(what: str, packet: Any) -> dict[str, Any]:
    """Return the state with these bytes. Raises ValueError, with `what`, for others."""
    try:
        value = torch.load(io.BytesIO(packet), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has no exception of its own
        raise ValueError(f"{what} of the state cannot be read: {type(error).__name__}: {error}") from error
    check_mapping(f"{what} of the state", value)
    return dict(value)


class FSDPExchange(GradientExchange):
    """Exchanges a model's gradients between replicas with compression. `compress` is another name for it.

    The replicas are those of the meshes that `fully_shard` (HSDP) or `replicate` was called with: it takes the
    place of FSDP2's all-reduce. Or they are the machines, after `fully_shard` with `local_mesh(transport)`.

    Construction is collective, before training. All replicas must begin with the same parameters. Parameters that
    are frozen now take no part. The gradient of a trainable parameter that a backward pass does not use counts as
    zero. Save `compression_state_dict()` on each rank: it has the residual of this rank's rows.

    Args:
        model: The model, on which `fully_shard` or `replicate` was called last.
        compression: A compressor of `dgc.compression`, a Route, or Horovod's Compression.none or .fp16. None: no
            compression. A compressor that needs a matrix gets this rank's rows of the parameter.
        transport: Connects all ranks, with groups inside and between machines: `connect(hierarchical=True)`. None:
            the meshes of the model have replicas.
        nonfinite, steps_per_epoch: As for `dgc.ddp.compress`.
        grad_scaler: The GradScaler or ShardedGradScaler that scales the loss, if any.

    Attributes:
        meter (TrafficMeter): Bytes that this rank sent to other replicas, and seconds.
        dropped_steps (int): Backward passes whose gradients were dropped because of NaN or inf.

    Raises:
        ValueError: An argument is invalid, a setting differs between ranks, machines have different numbers of
            ranks, the model has no replicas, or its gradients are exchanged already.
    """

    _is_sharded = True

    def __init__(
        self,
        model: nn.Module,
        compression: Compressor | Route | HorovodCompression | None = None,
        *,
        transport: Transport | None = None,
        nonfinite: str = "skip",
        grad_scaler: Any = None,
        steps_per_epoch: int | None = None,
    ):
        settings = ExchangeSettings(compression, nonfinite, grad_scaler, steps_per_epoch)
        for rule in settings.route.rules:
            if isinstance(rule.compressor, ExchangesMomentum):
                raise ValueError(
                    f"{type(rule.compressor).__name__} exchanges the momentum of an optimizer, which dgc.fsdp does"
                    " not pass to it: use a compressor of gradients"
                )
        if transport is not None:
            check_ranks(transport)
        self._groups = groups = parameter_groups(model)
        for group in groups:
            group.check_no_hook()
            group.check_elements()
        self._opened: list[Transport] = []
        if transport is None:
            self._opened, replicas_of = replicas_of_meshes(groups)
            transport = self._opened[0]
        else:
            of_machines = replicas_of_machines(transport, groups)
            replicas_of = {group.mesh: of_machines for group in groups}
        settings.check_equal(transport)
        self._name, self._kind = unique_prefix(transport), replicas_of[groups[0].mesh].kind
        self._plans = plan_groups(groups, replicas_of, settings.route, self._name)
        planned = [bucket for plan in self._plans for bucket in plan.buckets]
        connections = [replicas.transport for replicas in replicas_of.values()]
        # ranks that share replicas have the same results: a reason to drop a step is told within their shards
        meets_all = transport.group_size("local") * transport.group_size("cross") == transport.size
        self._told: Group = "local" if len(set(connections)) == 1 and meets_all else "world"
        loss_scale = LossScale(grad_scaler, planned)
        # whole parameters, so that a difference in rows that only some ranks have is seen by all of them
        own = [
            (plan.group.label, name, str(p.dtype), tuple(p.shape), type(compressor).__name__)
            for plan in self._plans
            for name, p, compressor in zip(plan.group.names, plan.group.parameters, plan.compressors, strict=True)
        ]
        check_equal_plans(own, transport)
        # in model order: positions name the saved states
        compressors = list(dict.fromkeys(c for plan in reversed(self._plans) for c in plan.compressors))
        for connection in connections:
            check_can_send(compressors, connection)
        first, *others = connections
        states = keep_states(planned, first.size, first.rank, compressors)
        buckets = [p.buckets for p in self._plans]
        plan = GradientPlan(buckets, states, first, self._name, loss_scale, others=others)
        effect = "every rank drops this step, in which every .grad is None"
        super().__init__(settings, plan, transport, TrafficMeter(), effect)
        self._parameters = {p for group in groups for p in group.parameters}
        self._model = ref(model)
        self._machines: DeviceMesh | None = None
        self._engine.order = StartOrder([1] * len(groups), transport, self._name)
        self._parts = [0] * len(groups)  # reduce-scatters of each group in this backward pass
        self._expected: list[int] | None = None  # the same, of the first pass
        self._momentum: WeakKeyDictionary[Optimizer, MomentumCheck] = WeakKeyDictionary()
        self._end_checks, self._awaited_step = before_steps(self.check_step), AwaitedStep(self._parameters)
        self._side = side = self._engine.streams.get(groups[0].device)
        for g, group in enumerate(groups):
            group.install(partial(self._take, g), side.stream if side else None)
            group.claim(self)

    # --- one backward pass ------------------------------------------------------------------------

    @torch.no_grad()
    def _take(self, g: int, output: Tensor) -> None:
        """Take the gradients of a group. On a GPU, the current stream is the side stream."""
        if not self._pass.is_running:
            self._begin()
        plan = self._plans[g]
        plan.group.check(output)
        # not later: the residual has the unit of .grad
        plan.add(output, plan.group.scale(plan.replicas.transport.size))
        output.zero_()
        if output.is_cuda:  # FSDP2 may free it while this stream still reads it
            output.record_stream(torch.cuda.current_stream(output.device))
        if plan.group.is_exchanged:
            # there are several results if the module runs several times in forward
            if self._expected is not None and self._parts[g] == self._expected[g]:
                raise RuntimeError(
                    f"{plan.group.label} runs more often in this forward pass than in the first, "
                    f"{self._expected[g]} times: its exchange has started, and the rest of its gradient would be "
                    "lost"
                )
            self._parts[g] += 1
            self._engine.order.add(g)
            if self._expected is not None:
                for full in self._engine.order.start():
                    self._start(full)
                self._engine.advance()

    def _begin(self) -> None:
        """Begin a backward pass."""
        self._engine.check_ended("backward()")
        check_all_exchanged(self._groups)
        if self._pass.has_failed:
            for plan in self._plans:
                plan.has_gradients = False
        self._pass.begin(self._end)
        self._parts = [0] * len(self._plans)
        self._engine.order.reset()
        for g, group in enumerate(self._groups):
            if not group.is_exchanged:
                self._engine.order.add(g)  # nothing to wait for

    def _start(self, g: int) -> None:
        if self._groups[g].is_exchanged:
            self._plans[g].fill()
            self._engine.start(g)

    def _end(self) -> None:
        """End a backward pass, unless no group was to be exchanged in it."""
        if any(group.is_exchanged for group in self._groups):
            self._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        """Wait for the exchange of all groups, and complete .grad. Runs at the end of backward."""
        is_first = self._expected is None
        if is_first:
            check_equal_models(self._plans, self._ranks, f"{self._name}.models")
        with self._side.after_caller() if self._side else nullcontext():
            outcome = self._finish_step(learn=not is_first)
            if is_first:
                self._expected = [max(1, parts) for parts in self._parts]
                self._engine.order = StartOrder(self._expected, self._ranks, self._name)
            if outcome.nonfinite is None:
                for planned, result in outcome.results:
                    result.write_to(planned.bucket)
                    self._loss_scale.multiply_(planned.bucket.flat)
                for plan in self._plans:
                    if plan.group.is_exchanged:
                        plan.deliver()
        if self._side:
            self._side.join()
        if outcome.nonfinite is not None:
            self._drop(outcome.nonfinite)

    def _identity(self) -> Identity:
        """A rank is a replica of the first mesh, and its shard is what it has of the model."""
        first, *others = (plan.replicas.lists for plan in self._plans if plan.replicas.are_exchanged)
        identity = super()._identity()
        if any(other != first for other in others):  # a rank is another replica on another mesh
            identity = replace(identity, settings={**identity.settings, REPLICAS: repr([first, *others])})
        shard = next(s for s, ranks in enumerate(first) if self._ranks.rank in ranks)
        return replace(identity, shard=shard, shards=len(first))

    def _judge(self, reason: str | None) -> str | None:
        flag = torch.tensor([reason is not None], dtype=torch.int64)
        if not all_reduce(self._ranks, flag, "max", f"{self._name}.dropped", self._told).item():
            return None
        reasons = all_gather_object(self._ranks, reason, f"{self._name}.reason")
        return f"{next(filter(None, reasons))} (the rank is the number of a {self._kind})"

    def _drop(self, reason: str) -> None:
        for plan in self._plans:
            plan.has_gradients = False
        self._drops.withhold(self._parameters)
        if self._drops.drop(reason):
            raise NonFiniteGradientError(reason)

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self, of_each_rank: bool = True, replicas: int | None = None) -> dict[str, Any]:
        """Return what is not sent yet, for torch.distributed.checkpoint. Collective.

        Args:
            of_each_rank: With the rest of the state of each rank. A run continues bit for bit with it, on the same
                replicas and shards. Without it, the state can be loaded from a checkpoint of any number of shards.
            replicas: To load a checkpoint of another number of replicas, without `of_each_rank`: their number.

        Returns:
            "rows": For each compressor and table, by parameter name, a DTensor [replicas, ...], whose element m
            belongs to replica m, and which is sharded as the parameter. "ranks": The rest of this rank's state as
            bytes, such as the factors of PowerSGD. "common": Counts of steps and the epoch, as bytes.

        Raises:
            RuntimeError: As `compression_state_dict`.
        """
        return self._state_of(of_each_rank, lambda _: replicas)

    def state_for(self, sizes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Return a state to load a checkpoint into, given the sizes of its tensors, and 0 sizes of all else.

        Keys are those of torch.distributed.checkpoint. It is `of_each_rank` if replicas and ranks are the same.
        """
        numbers = {key: size[0] for key, size in sizes.items() if key.startswith(f"{ROWS}.")}
        is_same = sum(key.startswith(f"{RANKS}.") for key in sizes) == self._ranks.size
        own = self._state_of(True, lambda _: None)
        for method, tables in own[ROWS].items():
            for table, values in tables.items():
                for name, rows in values.items():
                    is_same = is_same and numbers.get(f"{ROWS}.{method}.{table}.{name}") == rows.shape[0]
        if all(all_gather_object(self._ranks, is_same, "state.same")):  # a rank may have no rows
            return own
        return self._state_of(False, numbers.get)

    def _state_of(self, of_each_rank: bool, replicas: Callable[[str], int | None]) -> dict[str, Any]:
        """See `state_dict`. replicas: Of a key of torch.distributed.checkpoint, their number. None: as now."""
        state, rows, counts = self.compression_state_dict(), dict[str, Any](), dict[str, Any]()
        mesh = self._mesh_of_machines()
        owners = {n: (plan, p) for plan in self._plans for n, p in plan.named}
        for method, states in named_methods(self._methods).items():
            for table in [table for table in state[method] if table not in {METHOD, *states.partial}]:
                values = state[method][table]
                if all(isinstance(value, Tensor) for value in values.values()):
                    del state[method][table]
                    stacked = rows.setdefault(method, {}).setdefault(table, {})
                    for name, value in values.items():
                        plan, p = owners[name]
                        number = replicas(f"{ROWS}.{method}.{table}.{name}") or plan.replicas.transport.size
                        own = number == plan.replicas.transport.size
                        local = value.unsqueeze(0) if own else value.new_zeros(number, *value.shape)
                        stacked[name] = plan.group.stacked(p, local, number, own, mesh)
                elif all(type(value) is int for value in values.values()):
                    counts.setdefault(method, {})[table] = values
        common = {"counts": counts, "epochs": self._epochs.state_dict(), "identity": state[KEY]}
        parts = all_gather_object(self._ranks, common, "state.common")
        counts = merge([part["counts"] for part in parts])  # a rank has counts of its own parameters alone
        ranks = {str(self._ranks.rank): packed(state)} if of_each_rank else {}
        return {ROWS: rows, RANKS: ranks, COMMON: packed({**parts[0], "counts": counts})}

    def _mesh_of_machines(self) -> DeviceMesh | None:
        """Machines and their ranks, if the parameters have meshes of their machine alone. Collective."""
        plan = self._plans[0]
        if self._kind == "machine" and self._machines is None:
            ranks = torch.tensor(plan.replicas.lists, dtype=torch.int64).T.contiguous()
            self._machines = DeviceMesh(plan.group.parameters[0].device_mesh.device_type, ranks)
        return self._machines

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, or torch.distributed.checkpoint has loaded into it.

        Without `of_each_rank`, rows are redistributed among replicas, and what depends on shards begins anew.

        Raises:
            ValueError: As `load_compression_state_dict`, or the state cannot be redistributed.
        """
        if not isinstance(state, Mapping) or state.keys() != {ROWS, RANKS, COMMON}:
            raise ValueError("the state is not what state_dict() of a FSDPExchange returned")
        for key in (ROWS, RANKS):
            check_mapping(f"{key} of the state", state[key])
        rank = str(self._ranks.rank)
        own = self._begun(state[COMMON])
        if state[RANKS]:
            own = unpacked(f"{RANKS}.{rank}", state[RANKS].get(rank))
        for method, tables in state[ROWS].items():
            for table, values in tables.items():
                own.setdefault(method, {})[table] = {name: self._own_rows(name, v) for name, v in values.items()}
        self.load_compression_state_dict(own)

    def _begun(self, packet: Any) -> dict[str, Any]:
        """The state of this rank without its rows, from what all ranks have in common."""
        common, own = unpacked(COMMON, packet), dict[str, Any]()
        if common.keys() != {"counts", "epochs", "identity"}:
            raise ValueError(f"{COMMON} of the state has {sorted(map(str, common))}")
        for method, states in named_methods(self._methods).items():
            tables, counts = states.state_dict(), common["counts"].get(method, {})
            for table, values in tables.items():
                if table in states.partial:
                    tables[table] = {}
                elif table in counts:
                    tables[table] = {name: counts[table].get(name, 0) for name in values}
            own[method] = tables
        saved, mine = identity_of(common), self._identity()
        settings = {**saved.settings, **{k: v for k, v in mine.settings.items() if k == REPLICAS}}
        return identified({**own, **common["epochs"]}, replace(mine, step=saved.step, settings=settings))

    def _own_rows(self, name: str, saved: Any) -> Any:
        """This replica's share of the rows that replicas have saved."""
        ranks = next((plan.replicas.transport for plan in self._plans if name in plan.group.names), None)
        if ranks is None or not isinstance(saved, DTensor) or not saved.ndim:
            raise ValueError(f"rows of {name} in the state are not those of a parameter of this model: {saved!r}")
        rows = local_part(saved)
        if len(saved) == ranks.size:
            return rows[0]
        return blend(dict(enumerate(rows)), shares(len(saved), ranks.size, ranks.rank), name)

    # --- steps of optimizers ----------------------------------------------------------------------

    def check_step(self, optimizer: Optimizer) -> None:
        """Check that backward has ended and momentum is applied once. Runs before each step of any optimizer."""
        if optimizer not in self._momentum:
            steps = {p for group in optimizer.param_groups for p in group["params"]}
            if self._parameters.isdisjoint(steps):
                return
            model = self._model()
            for name, p in model.named_parameters() if model is not None else ():
                if p in steps and p.requires_grad and p not in self._parameters:
                    raise_not_exchanged(name)
            # optimizers of all shards keep the same tensors, as checkpoints need
            rowless = [bucket for plan in self._plans for bucket in plan.rowless]
            self._momentum[optimizer] = MomentumCheck(optimizer, [*self.planned, *rowless], self._ranks)
            if self._steps <= 1:
                self._warn_of_lost_state(optimizer)
        self._check_idle("optimizer.step()")
        check_ended([self._groups[0].module])
        check_all_exchanged(self._groups)
        self._loss_scale.check_before_step(optimizer)
        self._momentum[optimizer].check(optimizer)

    def close(self) -> None:
        """Remove the hooks. FSDP2 then averages over the replicas of its meshes, and not between machines.

        Collective where the model's meshes have the replicas: their connections are ended.
        """
        self._end_checks()
        for group in self._groups:
            group.release(self)
        while self._opened:
            close(self._opened.pop())


compress = FSDPExchange
