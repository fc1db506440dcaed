"""Blocking collectives for control messages, such as statistics and settings. Their bytes are not metered.

An object's bytes, and their number, are followed by a crc32.
"""

import ctypes
import pickle
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from dgc.comm.requests import AllGather, AllReduce, Broadcast, Group, Op, Request
from dgc.comm.transport import Transport

CRC_BYTES = 4


def _wait_for(transport: Transport, name: str, request: Request, communicator: str = "") -> Any:
    return transport.wait(transport.launch(name, (request,), communicator))[0]


def all_reduce(
    transport: Transport, tensor: Tensor, op: Op = "mean", name: str = "all_reduce", group: Group = "world"
) -> Tensor:
    """Return the element-wise `op` over a group in a new tensor. Collective; shape and dtype must be equal."""
    return _wait_for(transport, f"dgc.control.{name}", AllReduce(tensor.clone(), op, group))


def broadcast_object(transport: Transport, obj: Any, root: int = 0, name: str = "broadcast_object") -> Any:
    """Return `root`'s object on every rank. The object must support pickle. Collective."""
    data = pickle.dumps(obj) if transport.rank == root else b""
    length = all_reduce(transport, torch.tensor([len(data)], dtype=torch.int64), "max", f"{name}.length").item()
    payload = with_checksum(data.ljust(int(length), b"\0"))
    received = _wait_for(transport, f"dgc.control.{name}", Broadcast(payload, root))
    return pickle.loads(checked(received, root, name))


def all_gather_object(
    transport: Transport, obj: Any, name: str = "all_gather_object", communicator: str = ""
) -> list[Any]:
    """Return the objects of all ranks, in rank order. They must support pickle. Collective on the communicator."""
    data = pickle.dumps(obj)
    own = with_checksum(len(data).to_bytes(8, "little"))
    found = _wait_for(transport, f"dgc.control.{name}.length", AllGather(own), communicator)
    lengths = [int.from_bytes(checked(part, rank, name), "little") for rank, part in enumerate(found)]
    payload = with_checksum(data.ljust(max(lengths), b"\0"))
    gathered = _wait_for(transport, f"dgc.control.{name}", AllGather(payload), communicator)
    return [pickle.loads(checked(part, rank, name)[: lengths[rank]]) for rank, part in enumerate(gathered)]


def barrier(transport: Transport, name: str = "barrier") -> None:
    """Block until every rank has called this function."""
    all_reduce(transport, torch.zeros(1, dtype=torch.float32), "sum", name)


@dataclass(frozen=True)
class MachineRank:
    """The number of this rank's machine and of this rank on it. Every machine has `local_size` ranks."""

    machine: int
    machines: int
    local_rank: int
    local_size: int


def find_machine_rank(transport: Transport, what: str) -> MachineRank:
    """Return this rank's place among the machines. Collective. what: Name of the user, for the error message.

    Raises:
        ValueError: The number of ranks differs between machines, or the transport has no `local` and `cross`.
    """
    here, across = transport.group_size("local"), transport.group_size("cross")
    bounds = torch.tensor([-here, here, -across, across], dtype=torch.int64)
    fewest, most, fewest_across, most_across = all_reduce(transport, bounds, "max", f"{what}.machines").tolist()
    if -fewest != most or -fewest_across != most_across:
        raise ValueError(f"{what} needs the same number of ranks on every machine, not {-fewest} to {most}")
    return MachineRank(transport.group_rank("cross"), across, transport.group_rank("local"), here)


def with_checksum(data: bytes) -> Tensor:
    """Return a message of the data, which `checked` opens."""
    return torch.frombuffer(bytearray(data + crc32(data).to_bytes(CRC_BYTES, "little")), dtype=torch.uint8)


def checked(payload: Tensor, rank: int, name: str) -> bytes:
    """Return the data of a message of `with_checksum`.

    Raises:
        RuntimeError: It has changed. The error names the rank that has sent it, and the message.
    """
    payload = payload.contiguous()
    whole = ctypes.string_at(payload.data_ptr(), payload.numel())
    data, checksum = whole[:-CRC_BYTES], whole[-CRC_BYTES:]
    if crc32(data).to_bytes(CRC_BYTES, "little") != checksum:
        raise RuntimeError(f"rank {rank} sent {name} with a wrong checksum: it changed in transit")
    return data
