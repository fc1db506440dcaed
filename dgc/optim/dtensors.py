"""The parameters of FSDP2, DTensors on a mesh: which rank holds which part, and messages between these ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dgc.comm.torch_distributed import exchange_parts
from dgc.optim.owners import Layout, sharded

TAG = 1 << 24  # of messages on a CPU: beside those of dgc.fsdp, which may use the same process group
_groups: dict[tuple[DeviceMesh, tuple[int, ...]], Any] = {}  # process groups over several dimensions of a mesh


class MeshRanks:
    """The ranks of some dimensions of a mesh, in the order of their process group. Construction is collective."""

    def __init__(self, mesh: DeviceMesh, dims: tuple[int, ...]):
        self._group = _group_of(mesh, dims)
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)

    def all_gather(self, own: Tensor) -> Sequence[Tensor]:
        gathered = own.new_empty(self.size, own.numel())
        dist.all_gather(list(gathered.unbind()), own, group=self._group)
        return gathered.unbind()

    def all_to_all(self, own: Tensor, splits: Sequence[int], receives: Sequence[int]) -> Sequence[Tensor]:
        received = own.new_empty(sum(receives))
        parts = received.split(list(receives))
        if own.is_cpu:
            for message in exchange_parts(parts, own.split(list(splits)), self._group, TAG):
                message.wait()
        else:
            dist.all_to_all_single(received, own, list(receives), list(splits), group=self._group)
        return parts


def _group_of(mesh: DeviceMesh, dims: tuple[int, ...]) -> Any:
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    if (mesh, dims) not in _groups:
        # only these ranks take part: others may have another mesh
        _groups[mesh, dims] = dist.new_group(_ranks_along(mesh, dims), use_local_synchronization=True)
    return _groups[mesh, dims]


def _ranks_along(mesh: DeviceMesh, dims: Sequence[int]) -> list[int]:
    """The ranks that differ from this one only in these dimensions of the mesh, in row-major order."""
    own = mesh.get_coordinate()
    assert own is not None
    return (
        mesh.mesh[tuple(slice(None) if dim in dims else own[dim] for dim in range(mesh.ndim))].flatten().tolist()
    )


def dims_of(p: DTensor, with_replicas: bool) -> tuple[int, ...] | None:
    """The dimensions of its mesh along which ranks hold different parts of a parameter.

    None: it is sharded in another way than by FSDP2 alone, as with tensor parallelism.
    with_replicas: all dimensions of the mesh.
    """
    if any(type(placement) not in (Shard, Replicate) for placement in p.placements):
        return None
    dims = range(p.device_mesh.ndim)
    return tuple(dim for dim in dims if with_replicas or isinstance(p.placements[dim], Shard))


def layout_of(p: DTensor, dims: tuple[int, ...]) -> Layout:
    """Where the ranks of `MeshRanks` hold a parameter."""
    mesh = p.device_mesh
    along = [placement.dim if isinstance(placement, Shard) else None for placement in p.placements]
    layout = sharded(p.shape, [mesh.size(dim) for dim in dims], [along[dim] for dim in dims])
    ranks = _ranks_along(mesh, dims)
    order = [ranks.index(rank) for rank in dist.get_process_group_ranks(_group_of(mesh, dims))]
    return Layout(tuple(layout.boxes[i] for i in order), tuple(layout.replicas[i] for i in order))


def on_whole(p: DTensor, u: Tensor, steps: Callable[[Tensor], Tensor]) -> Tensor:
    """This rank's part of what `steps` makes of a whole matrix, of which u is this rank's part. Collective."""
    mesh = p.device_mesh
    whole = DTensor.from_local(u, mesh, p.placements, shape=p.shape, stride=p.stride(), run_check=False)
    made = DTensor.from_local(steps(whole.full_tensor()), mesh, [Replicate()] * mesh.ndim, run_check=False)
    part: Tensor = made.redistribute(placements=p.placements).to_local()
    return part
