"""The parameter groups of FSDP2, and where each parameter lies in the result of a group's reduce-scatter.

A group has the parameters of one call of `fully_shard` or `replicate` that are on one mesh, which has shards,
replicas or both. Its hook receives one flat tensor: this rank's rows of each trainable parameter, one after
another. With n shards, a parameter [d, ...] has a place for ceil(d / n) rows on each. The last ranks may have
fewer rows, or none. The rest of the place is padding.

    n = 2, weight [3, 4], bias [3]      rank 0: 8 elements, 2 elements
                                        rank 1: 4 elements, 4 of padding, 1 element, 1 of padding

A parameter that is sharded along another dimension has no padding, because FSDP2 requires a multiple of n there.

Where a mesh has replicas, FSDP2 averages over them itself, before its hook. `install` takes that out: the group
gets another `mesh_info`, with the same shards and without replicas. The parameters keep theirs, so that their
DTensors, gradients and checkpoints stay as they are.

All attributes of FSDP2 that are not part of its interface are read in this file, and listed in
compatibility.py.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo
from torch.distributed.tensor import DTensor, Replicate, Shard

from dgc.comm.collectives import all_gather_object, find_machine_rank
from dgc.comm.transport import Transport
from dgc.fsdp.compatibility import CONTEXT, GROUP, PARAMETER, REPLICATED_MESH, SHARDED_MESH, STATE, TORCH

# of each parameter group of FSDP2, a weak reference to what exchanges it
_owners: WeakKeyDictionary[Any, weakref.ref[Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Place:
    """The place of a parameter in the result of a reduce-scatter, in elements: rows of `shape`, then padding."""

    start: int
    shape: tuple[int, ...]
    reserved: int

    def rows_of(self, output: Tensor) -> Tensor:
        """Return a flat view of this rank's rows."""
        return output[self.start : self.start + prod(self.shape)]


def lay_out(shapes: Sequence[tuple[Sequence[int], Sequence[int], int]], ranks: int) -> tuple[Place, ...]:
    """Return the place of each parameter of a group, on a mesh of `ranks` ranks.

    shapes: for each parameter its shape, the shape of this rank's shard, and the dimension that is divided.
    """
    places, start = [], 0
    for whole, shard, dim in shapes:
        largest = -(-whole[dim] // ranks)
        reserved = largest * prod(whole[:dim]) * prod(whole[dim + 1 :])
        places.append(Place(start, tuple(shard), reserved))
        start += reserved
    return tuple(places)


@dataclass(frozen=True)
class GroupMesh:
    """The ranks of a parameter group, as one of them sees it.

    shards: The ranks among which its parameters are divided. replicas: Those that have the same shards, over which
    FSDP2 averages after its reduce-scatter. None: the mesh has no such dimension.
    """

    shards: tuple[int, ...]
    replicas: tuple[int, ...] | None


class ParameterGroup:
    """The trainable parameters on one mesh of one call of `fully_shard` or `replicate` on `module`.

    label: Name of the group, for messages. group: FSDP2's own object. names: Names of the model's parameters.
    """

    def __init__(self, label: str, module: FSDPModule, group: Any, names: dict[Tensor, str]):
        self.label, self.module, self._group = label, module, group
        TORCH.check(group, GROUP)
        for shard in group.fsdp_params:
            TORCH.check(shard, PARAMETER)
        self.mesh = _mesh_of(group.mesh_info)
        self.device: Any = group.device  # of reduced gradients, also with CPU offloading
        self._hook: Callable[[Tensor], None] | None = None
        self._restore: Callable[[], None] = lambda: None  # what `install` has changed beside the hook
        self._shards = shards = [s for s in group.fsdp_params if s.sharded_param.requires_grad]
        self.parameters: tuple[DTensor, ...] = tuple(shard.sharded_param for shard in shards)
        self.names = tuple(names[p] for p in self.parameters)
        self.gathered: tuple[DTensor, ...] = tuple(shard.sharded_param for shard in group.fsdp_params)
        self.gathered_names = tuple(names[p] for p in self.gathered)
        self.places, self.gathered_places = (
            # of a parameter that other parallelism divides too, _orig_size is the part of these ranks
            lay_out(
                [(s._orig_size, s.sharded_param.to_local().shape, s.fsdp_placement.dim) for s in own],
                len(self.mesh.shards),
            )
            for own in (shards, group.fsdp_params)
        )
        self.numel = sum(place.reserved for place in self.places)

    def claim(self, owner: Any) -> None:
        _owners[self._group] = weakref.ref(owner)

    def release(self, owner: Any) -> None:
        """Forget the claim, and remove the hook, unless another one has taken its place."""
        if self._has_its_hook:
            self._hook = None
            self._group._all_reduce_hook = self._group._all_reduce_hook_stream = None
            self._restore()
        if self._group in _owners and _owners[self._group]() is owner:
            del _owners[self._group]

    def check_free(self) -> None:
        """Raise ValueError if something else exchanges the group."""
        owner = _owners[self._group]() if self._group in _owners else None
        if owner is not None:
            raise ValueError(
                f"{self.label} has a {type(owner).__name__} already: close() it before another exchange takes its "
                "place"
            )

    def check_no_hook(self) -> None:
        """Raise ValueError if the group has a hook of the user, or gradients that FSDP2 has not averaged yet."""
        if self._group._all_reduce_hook is not None:
            raise ValueError(
                f"{self.label} has a hook of set_all_reduce_hook already, whose place dgc.fsdp.compress would "
                "take: leave that hook out"
            )
        if self._group._partial_reduce_output is not None:
            raise ValueError(
                f"{self.label} has gradients of a backward pass with set_requires_all_reduce(False), which would "
                "be lost: call dgc.fsdp.compress before training, or after a step"
            )

    def takes_views_of(self, output: Tensor) -> bool:
        """Whether FSDP2 makes views of a reduce-scatter's result the gradients, and reads no element before."""
        ps = self.parameters
        is_read = any(p.grad is not None or p._post_accumulate_grad_hooks for p in ps)
        is_reduced_further = self.mesh.replicas is not None or self._group._all_reduce_hook is not None
        return output.dtype == ps[0].dtype and not is_read and not is_reduced_further

    def stacked(self, p: DTensor, rows: Tensor, replicas: int, own: bool, mesh: DeviceMesh | None) -> DTensor:
        """Return the DTensor [replicas, ...] of this rank's rows of a parameter.

        rows: [1, ...], of its own replica, or [replicas, ...]. mesh: Of replicas and shards. None: the mesh of the
        parameter has replicas.
        """
        at = Shard(0) if own else Replicate()
        placements: list[Any] = [_shifted(placement) for placement in p.placements]
        if mesh is not None:
            placements = [at, *placements]
        else:
            mesh = p.device_mesh
            groups = [tuple(dist.get_process_group_ranks(mesh.get_group(d))) for d in range(mesh.ndim)]
            placements = [
                at if ranks == self.mesh.replicas and isinstance(placement, Replicate) else placement
                for ranks, placement in zip(groups, placements, strict=True)
            ]
        shape = torch.Size([replicas, *p.shape])
        strides = torch.empty(shape, dtype=rows.dtype, device="meta").stride()
        return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=strides)

    @property
    def process_group(self) -> Any:
        """Of the ranks among which the parameters are divided."""
        return self._group.mesh_info.shard_process_group

    def mean_row(self, rows: Tensor) -> Tensor:
        """Return this rank's row of the mean of `rows`, [shards numel], over all ranks of the mesh. Collective."""
        info, ranks = self._group.mesh_info, len(self.mesh.shards) * len(self.mesh.replicas or (0,))
        row = rows.new_empty(self.numel)
        dist.reduce_scatter_single(row, rows, group=info.shard_process_group)
        if self.mesh.replicas is not None:
            dist.all_reduce(row, group=info.replicate_process_group)
        return row.div_(ranks)

    def gather(self, row: Tensor) -> Tensor:
        """Return the rows of all shards, [shards numel]. Collective."""
        rows = row.new_empty(len(self.mesh.shards) * row.numel())
        dist.all_gather_single(rows, row, group=self._group.mesh_info.shard_process_group)
        return rows

    def check_elements(self) -> None:
        """Raise ValueError for a parameter without elements, of which FSDP2 cannot reduce zeros."""
        for name, p in zip(self.names, self.parameters, strict=True):
            if not p.numel():
                raise ValueError(
                    f"{name} has no elements, and FSDP2 cannot reduce the gradient of such a parameter: set its "
                    "requires_grad to False"
                )

    def check_own_collectives(self) -> None:
        """Raise ValueError if the group does not use FSDP2's own reduce-scatter and all-gather."""
        for comm in (self._group._reduce_scatter_comm, self._group._all_gather_comm):
            if not type(comm).__name__.startswith("Default"):
                raise ValueError(
                    f"{self.label} has a {type(comm).__name__}, whose place dgc.fsdp.quantize would take: leave "
                    "out set_custom_reduce_scatter, set_custom_all_gather and other settings of FSDP2's buffers"
                )

    def use_collectives(self, reduce_scatter: Any, all_gather: Any) -> Callable[[], None]:
        """Let the group use other collectives. None: unchanged. Returns what undoes it."""
        group = self._group  # FSDP2's own setters refuse modules with several groups
        before = group._reduce_scatter_comm, group._all_gather_comm, group.reduce_scatter_unused_params

        def install(reduce_scatter: Any, all_gather: Any, unused: bool) -> None:
            if reduce_scatter is not None:
                group._reduce_scatter_comm, group.reduce_scatter_unused_params = reduce_scatter, unused
            if all_gather is not None:
                group._all_gather_comm = all_gather

        install(reduce_scatter, all_gather, True)
        return lambda: install(*before)

    def install(self, hook: Callable[[Tensor], None], stream: torch.cuda.Stream | None) -> None:
        """Set the hook that takes the result of each reduce-scatter, in place of FSDP2's all-reduce.

        Unused parameters get zeros there.
        """
        self._hook, group = hook, self._group  # FSDP2's own setters refuse modules with several groups
        group._all_reduce_hook, group._all_reduce_hook_stream = hook, stream
        unused, group.reduce_scatter_unused_params = group.reduce_scatter_unused_params, True
        restore_mesh = _leave_out_all_reduce(group)

        def restore() -> None:
            group.reduce_scatter_unused_params = unused
            restore_mesh()

        self._restore = restore

    @property
    def is_sharded(self) -> bool:
        """Whether its mesh has shards, though it may be one."""
        return isinstance(self._group.mesh_info, FSDPMeshInfo)

    @property
    def _has_its_hook(self) -> bool:
        return self._hook is not None and self._group._all_reduce_hook is self._hook

    @property
    def is_exchanged(self) -> bool:
        """Whether this backward pass ends with an exchange between machines: it does not only add gradients."""
        return bool(self._group.reduce_grads and self._group.all_reduce_grads)

    def scale(self, replicas: int) -> float:
        """Return the factor of a reduce-scatter's result whose mean over the replicas is the gradient.

        That is the mean over all ranks, or their sum divided by `set_gradient_divide_factor`. FSDP2 divides in the
        reduce-scatter. With `set_force_sum_reduction_for_comms` it would do so after its hook, when the gradient
        has been taken already.
        """
        factor, sums = self._group.gradient_divide_factor, self._group.force_sum_reduction_for_comms
        shards = len(self.mesh.shards)
        is_divided = not sums or shards == 1  # of one rank FSDP2 divides the gradient itself
        if factor is None:
            return 1.0 if is_divided else 1 / shards
        return replicas if is_divided else replicas / factor

    def check_not_replaced(self, since: str) -> None:
        """Raise RuntimeError if parameters were replaced. since: what the user has called of dgc.fsdp."""
        if any(s.sharded_param is not p for s, p in zip(self._shards, self.parameters, strict=True)):
            raise RuntimeError(
                f"parameters of {self.label} were replaced after dgc.fsdp.{since}, for example by "
                "load_state_dict(assign=True): replace them before"
            )

    def check_unchanged(self) -> None:
        """Raise RuntimeError if the hook was replaced, or other parameters of the group are trainable now."""
        self.check_not_replaced("compress")
        trained = [shard for shard in self._group.fsdp_params if shard.sharded_param.requires_grad]
        if trained != self._shards:
            changed = [name for name, p in zip(self.names, self.parameters, strict=True) if not p.requires_grad]
            changed += [shard._param_fqn for shard in trained if shard not in self._shards]
            raise RuntimeError(
                f"{changed[0]} of {self.label} was frozen or unfrozen after dgc.fsdp.compress: close() the "
                "exchange and compress again"
            )
        if not self._has_its_hook:
            raise RuntimeError(
                f"the hook of {self.label} was replaced after dgc.fsdp.compress, so that replicas would no longer "
                "exchange its gradients: leave out set_all_reduce_hook, or close() the exchange"
            )

    def check(self, output: Tensor) -> None:
        """Raise RuntimeError if a reduce-scatter's result or another hook does not fit."""
        if output.dtype == torch.float16:
            raise RuntimeError(
                f"{self.label} reduces gradients in fp16, which FSDP2 divides only after its hook: pass "
                "fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
            )
        if output.numel() != self.numel:
            raise RuntimeError(
                f"{self.label} has {output.numel()} gradient elements on this rank, not {self.numel}: leave "
                "set_reduce_scatter_unused_params as dgc.fsdp.compress has set it"
            )
        hooked = [n for n, p in zip(self.names, self.parameters, strict=True) if p._post_accumulate_grad_hooks]
        if hooked:
            raise RuntimeError(
                f"{hooked[0]} has a hook that runs when its gradient is accumulated, before replicas have "
                "exchanged it: an optimizer that steps during backward is not supported"
            )


def _shifted(placement: Any) -> Any:
    """The placement of a dimension with one more before it."""
    if isinstance(placement, Replicate):
        return placement
    more = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
    return type(placement)(placement.dim + 1, **more)  # a Shard, or one that other parallelism has divided before


def check_ended(modules: Iterable[FSDPModule]) -> None:
    """Raise RuntimeError if an exception has ended FSDP2's last backward pass. Not to be called during one."""
    if any(module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued for module in modules):
        raise RuntimeError(
            "an exception has ended a backward pass, and FSDP2 has not been reset: call reset_iter_state() on the "
            "outermost model where you catch the exception, and begin the step again"
        )


def check_all_exchanged(groups: Sequence[ParameterGroup]) -> None:
    """Raise RuntimeError if a group has changed, or each replica would train a parameter of the model alone."""
    for group in groups:
        group.check_unchanged()
    for state in groups[0].module._get_fsdp_state()._state_ctx.all_states:  # none before the first forward pass
        for own in state._fsdp_param_groups:
            trained = [shard._param_fqn for shard in own.fsdp_params if shard.sharded_param.requires_grad]
            if trained and own._all_reduce_hook is None:
                raise_not_exchanged(trained[0])


def raise_not_exchanged(name: str) -> NoReturn:
    raise RuntimeError(
        f"each replica would train {name} alone: it was unfrozen, sharded or added after dgc.fsdp.compress, or it "
        "is not in the model that compress was called with. close() the exchange, and call compress with the "
        "whole model"
    )


def sharded_like(p: DTensor, own: Tensor) -> DTensor:
    """Return the DTensor that is sharded as `p`, from this rank's part of it."""
    return DTensor.from_local(own, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def parameter_groups(model: nn.Module, frozen: bool = False) -> list[ParameterGroup]:
    """Return the groups with trainable parameters, in the order in which backward reduces them in most models.

    That is the reverse order of registration, with a module after its children.

    Args:
        model: The model.
        frozen: Also return the groups without trainable parameters.

    Raises:
        ValueError: `model` is no module, or a trainable parameter belongs to no group or is exchanged already.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module on which fully_shard was called, not {model!r}")
    sharded: dict[int, tuple[str, FSDPModule]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):  # of several modules in one call of fully_shard, the first
            label = f"module {name}" if name else "the model"
            sharded.setdefault(id(module._get_fsdp_state()), (label, module))
    for _, module in sharded.values():
        module.reshard()  # after a forward pass the outermost module has gathered parameters in their place
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    groups = [group for label, module in sharded.values() for group in _groups_of(label, module, names)]
    for group in groups:
        group.check_free()
    owned = {p for group in groups for p in group.parameters}
    missing = [name for p, name in names.items() if p.requires_grad and p not in owned]
    if missing:
        raise ValueError(
            f"{len(missing)} trainable parameters are not sharded, such as {missing[0]}: call fully_shard or "
            "replicate on the whole model first"
        )
    used = [group for group in reversed(groups) if (group.gathered if frozen else group.parameters)]
    if not used:
        raise ValueError("the model has no trainable parameters")
    return used


def _groups_of(label: str, module: FSDPModule, names: dict[Tensor, str]) -> list[ParameterGroup]:
    state = module._get_fsdp_state()
    TORCH.check(state, STATE)
    TORCH.check(state._state_ctx, CONTEXT)
    groups: list[Any] = list(state._fsdp_param_groups)
    labels = [f"parameter group {g} of {label}" for g in range(len(groups))] if len(groups) > 1 else [label]
    return [ParameterGroup(own, module, group, names) for own, group in zip(labels, groups, strict=False)]


def _mesh_of(info: Any) -> GroupMesh:
    shards, replicas = tuple([dist.get_rank()]), None
    if isinstance(info, FSDPMeshInfo):
        TORCH.check(info, SHARDED_MESH)
        shards = tuple(dist.get_process_group_ranks(info.shard_process_group))
    if isinstance(info, DDPMeshInfo):
        TORCH.check(info, REPLICATED_MESH)
        replicas = tuple(dist.get_process_group_ranks(info.replicate_process_group))
    return GroupMesh(shards, replicas)


def _leave_out_all_reduce(group: Any) -> Callable[[], None]:
    """Let a group of FSDP2 not average over replicas. Returns what undoes it.

    FSDP2 averages if the `mesh_info` of the group, which it reads in every backward pass, is a DDPMeshInfo.
    """
    before = group.mesh_info
    if not isinstance(before, DDPMeshInfo):
        return lambda: None
    plain: Any = object.__new__(FSDPMeshInfo if isinstance(before, FSDPMeshInfo) else DataParallelMeshInfo)
    vars(plain).update(vars(before))  # also what versions of torch add

    def replace(old: Any, new: Any) -> None:
        group.mesh_info = new
        if group.post_forward_mesh_info is old:  # FSDP2 compares the two
            group.post_forward_mesh_info = new

    replace(before, plain)
    return lambda: replace(plain, before)


def check_sharded(groups: Iterable[ParameterGroup]) -> None:
    """Raise ValueError if the parameters of a group are not divided, but replicated."""
    for group in groups:
        if not group.is_sharded:
            raise ValueError(
                f"the parameters of {group.label} are replicated, so that FSDP2 gathers no weights: call "
                "dgc.fsdp.compress, which exchanges gradients between replicas"
            )


def check_shards(groups: Iterable[ParameterGroup], ranks: Sequence[int]) -> None:
    """Raise ValueError unless all groups are sharded over these ranks of one machine, and nothing else."""
    cure = "call fully_shard(module, mesh=local_mesh(transport))"
    for group in groups:
        if group.mesh.replicas is not None:
            raise ValueError(
                f"the mesh of {group.label} has replicas, which a transport would describe a second time: call "
                f"dgc.fsdp.compress without transport=, or {cure}"
            )
        if (ndim := group.gathered[0].device_mesh.ndim) != 1:
            raise ValueError(f"{group.label} is sharded over a mesh of {ndim} dimensions: {cure}")
        if group.mesh.shards != tuple(ranks):
            raise ValueError(
                f"{group.label} is sharded over ranks {list(group.mesh.shards)}, and this machine has ranks "
                f"{list(ranks)}: {cure}"
            )


def check_ranks(transport: Transport) -> None:
    """Raise ValueError unless `transport` is a Transport of the same ranks as torch.distributed."""
    if isinstance(transport, type) or not isinstance(transport, Transport):
        raise ValueError(f"transport must be what dgc.comm connects, with hierarchical=True, not {transport!r}")
    ranks = dist.get_world_size() if dist.is_initialized() else 0
    if transport.size != ranks:
        raise ValueError(
            f"transport has {transport.size} ranks, and torch.distributed has {ranks}: use "
            "dgc.comm.torch_distributed.connect(hierarchical=True)"
        )


def machines(transport: Transport) -> list[list[int]]:
    """Return the ranks of each machine. Raise ValueError on every rank if their numbers differ. Collective."""
    own = find_machine_rank(transport, "FSDP2 between machines").machine
    numbers = all_gather_object(transport, own, "machines")
    return [[rank for rank, number in enumerate(numbers) if number == machine] for machine in sorted(set(numbers))]


def local_mesh(transport: Transport, device_type: str | None = None) -> DeviceMesh:
    """Return the one-dimensional mesh of this machine's ranks, for `fully_shard`. Collective.

    Args:
        transport: Connects the ranks, with torch.distributed initialised.
        device_type: Device of the parameters. None: "cuda" if there is one, else "cpu".

    Raises:
        ValueError: An argument is invalid, or machines have different numbers of ranks.
    """
    check_ranks(transport)
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        is_type = isinstance(device_type, str) and torch.device(device_type).index is None
    except RuntimeError:
        is_type = False
    if not is_type:
        raise ValueError(f"device_type must be 'cpu', 'cuda' or another one without a number, not {device_type!r}")
    groups = [dist.new_group(ranks) for ranks in machines(transport)]  # every rank takes part in all of them
    return DeviceMesh.from_group(groups[transport.group_rank("cross")], device_type, mesh_dim_names=("local",))
