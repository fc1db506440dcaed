"""Blocking collectives for control messages, such as statistics and settings. Their bytes are not metered."""

import ctypes
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgc.comm.requests import AllGather, AllReduce, Broadcast, Op, Request
from dgc.comm.transport import Transport


def _wait_for(transport: Transport, name: str, request: Request, lane: str = "") -> Any:
    return transport.wait(transport.launch(name, (request,), lane))[0]


def all_reduce(transport: Transport, tensor: Tensor, op: Op = "mean", name: str = "all_reduce") -> Tensor:
    """Return the element-wise `op` over all ranks in a new tensor. Collective; shape and dtype must be equal."""
    return _wait_for(transport, f"dgc.control.{name}", AllReduce(tensor.clone(), op))


def broadcast_object(transport: Transport, obj: Any, root: int = 0, name: str = "broadcast_object") -> Any:
    """Return `root`'s object on every rank. The object must support pickle. Collective."""
    data = _to_bytes(obj) if transport.rank == root else torch.empty(0, dtype=torch.uint8)
    length = all_reduce(transport, torch.tensor([data.numel()], dtype=torch.int64), "max", f"{name}.length").item()
    if transport.rank != root:
        data = torch.empty(int(length), dtype=torch.uint8)
    return _from_bytes(_wait_for(transport, f"dgc.control.{name}", Broadcast(data, root)))


def all_gather_object(
    transport: Transport, obj: Any, name: str = "all_gather_object", lane: str = ""
) -> list[Any]:
    """Return the objects of all ranks, in rank order. They must support pickle. Collective on the lane."""
    data = _to_bytes(obj)
    length = torch.tensor([data.numel()], dtype=torch.int64)
    lengths = _wait_for(transport, f"dgc.control.{name}.length", AllGather(length), lane)
    padded = torch.zeros(int(max(length.item() for length in lengths)), dtype=torch.uint8)
    padded[: data.numel()] = data
    gathered = _wait_for(transport, f"dgc.control.{name}", AllGather(padded), lane)
    return [_from_bytes(d[: int(n.item())]) for d, n in zip(gathered, lengths, strict=True)]


def barrier(transport: Transport, name: str = "barrier") -> None:
    """Block until every rank has called this function."""
    all_reduce(transport, torch.zeros(1, dtype=torch.float32), "sum", name)


@dataclass(frozen=True)
class MachineRank:
    """The machine of this rank. Every machine has the same number of ranks.

    Attributes:
        machine: Number of this rank's machine.
        machines: Number of machines.
        local_rank: Number of this rank on its machine.
        local_size: Number of ranks of each machine.
    """

    machine: int
    machines: int
    local_rank: int
    local_size: int


def find_machine_rank(transport: Transport, what: str) -> MachineRank:
    """Return this rank's place among the machines. Collective.

    Args:
        transport: A transport with the groups `local` and `cross`.
        what: Name of the user, for the error message.

    Raises:
        ValueError: The number of ranks differs between machines, or the transport lacks the groups.
    """
    here, across = transport.group_size("local"), transport.group_size("cross")
    bounds = torch.tensor([-here, here, -across, across], dtype=torch.int64)
    fewest, most, fewest_across, most_across = all_reduce(transport, bounds, "max", f"{what}.machines").tolist()
    if -fewest != most or -fewest_across != most_across:
        raise ValueError(f"{what} needs the same number of ranks on every machine, not {-fewest} to {most}")
    return MachineRank(transport.group_rank("cross"), across, transport.group_rank("local"), here)


def _to_bytes(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    data = data.contiguous()
    return pickle.loads(ctypes.string_at(data.data_ptr(), data.numel()))
