"""The mesh of the ranks of one machine."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dgc.comm.collectives import all_gather_object, find_machine_rank
from dgc.comm.transport import Transport


def machines(transport: Transport) -> list[list[int]]:
    """Return the ranks of each machine. Collective.

    Raises:
        ValueError: Machines have different numbers of ranks. Raised on every rank.
    """
    own = find_machine_rank(transport, "FSDP2 between machines").machine
    numbers = all_gather_object(transport, own, "machines")
    return [[rank for rank, number in enumerate(numbers) if number == machine] for machine in sorted(set(numbers))]


def local_mesh(transport: Transport, device_type: str | None = None) -> DeviceMesh:
    """Return the one-dimensional mesh of this machine's ranks, for `fully_shard`. Collective.

    Args:
        transport: Connects the ranks, with torch.distributed initialised.
        device_type: Device of the parameters. None: "cuda" if there is one, else "cpu".

    Raises:
        ValueError: Machines have different numbers of ranks.
    """
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    groups = [dist.new_group(ranks) for ranks in machines(transport)]  # every rank takes part in all of them
    return DeviceMesh.from_group(groups[transport.group_rank("cross")], device_type, mesh_dim_names=("local",))
