"""A transport over Horovod, with its MPI or Gloo controller. No other file imports Horovod."""

import atexit
import os
import socket
import sys
import time
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from typing_extensions import assert_never

from dgc.comm.collectives import all_gather_object
from dgc.comm.presence import Address, Presence, explain
from dgc.comm.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Group,
    ReduceScatter,
    Reply,
    Request,
    as_bytes,
    reply_of_one,
)
from dgc.comm.staging import StagedTransport
from dgc.comm.transport import GroupedTransport, Groups, Transport
from dgc.launch import check_launcher, may_span_machines, started_by
from dgc.warn import warn


def prepare_environment() -> None:
    """Set environment variables before Horovod starts. Values that the user has set are kept.

    HOROVOD_FUSION_THRESHOLD: fusion groups messages by arrival time. With three or more ranks, sums, and therefore
    whole runs, differ in the last bits between repeats. Buckets replace fusion here.
    HOROVOD_CYCLE_TIME: Horovod looks for new messages once per cycle, by default 1 ms. Each round waits for one.
    OPAL_PREFIX: a process that mpirun did not start cannot find the Open MPI of a Python environment.
    OMPI_MCA_mpi_yield_when_idle: while Horovod's thread waits for other ranks, the core's other threads run.
    Otherwise 2 ranks that compute on 2 cores take up to twice as long, also when nothing is exchanged.
    OMPI_MCA_btl: Open MPI's part for one-sided messages over libfabric, which Horovod does not use, sleeps for a
    second at the end. A process without a launcher, which sends nothing, leaves it out.
    """
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "0.2")
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    launched = "OMPI_COMM_WORLD_RANK" in os.environ
    if not launched and (Path(sys.prefix) / "bin" / "orted").exists():
        os.environ.setdefault("OPAL_PREFIX", sys.prefix)
    if started_by(os.environ) is None:
        os.environ.setdefault("OMPI_MCA_btl", "^ofi")


_fusion_threshold = os.environ.get("HOROVOD_FUSION_THRESHOLD")
prepare_environment()
import horovod.torch as hvd  # noqa: E402  (its libraries read the environment when they are loaded)

_uses_fusion = _fusion_threshold not in (None, "0") or (_fusion_threshold is None and hvd.is_initialized())
NO_BYTES = torch.empty(0, dtype=torch.uint8)
LONGEST_WAIT_AT_EXIT = 10.0  # seconds
PAUSE = 1e-5  # seconds between two looks at a message that has a time limit
LOST = ("has been shut down", "gloo/transport")  # in Horovod's errors when a rank is gone
_OPS = {"mean": hvd.Average, "sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}


def _meet_at_exit() -> None:
    """Wait for the other ranks before Horovod shuts down.

    The first rank that leaves ends Horovod on all ranks, including what another machine still sends in a group of
    its own. The wait is limited, since another rank may have failed.
    """
    if hasattr(sys, "last_value") or not hvd.is_initialized():
        return
    handle = hvd.allreduce_async_(torch.zeros(1, dtype=torch.float32), name="dgc.exit")
    end = time.monotonic() + LONGEST_WAIT_AT_EXIT
    while not hvd.poll(handle) and time.monotonic() < end:
        time.sleep(0.001)


def meet_at_exit() -> None:
    """Let this rank wait for the others at exit. Every rank must call it, after hvd.init()."""
    atexit.unregister(_meet_at_exit)  # once per process; it must run before Horovod's own shutdown
    atexit.register(_meet_at_exit)


class _Ending:
    """Whether a message was waited for in vain. Horovod's shutdown would then wait for the same rank, for ever."""

    in_vain = False
    is_registered = False

    @classmethod
    def register(cls) -> None:
        """Let the process end without Horovod's shutdown in that case. Call it after hvd.init()."""
        if not cls.is_registered:
            atexit.register(cls._end)  # what is registered later, such as the user's functions, is called before
            cls.is_registered = True

    @classmethod
    def _end(cls) -> None:
        if cls.in_vain:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


_cannot_join: WeakSet["HorovodTransport"] = WeakSet()  # with exchanges that are not all-reduces alone
_join = hvd.join


@wraps(_join)
def _join_if_all_reduces(*args: Any, **options: Any) -> Any:
    """hvd.join(), unless another rank may still gather payloads: Horovod would then wait for ever."""
    if _cannot_join:
        raise RuntimeError(
            "hvd.join() serves all-reduces of dense gradients only, and compressed gradients are gathered from "
            "all ranks: let every rank take the same number of steps, without hvd.join(), or train without "
            "compression"
        )
    return _join(*args, **options)


hvd.join = _join_if_all_reduces
HorovodWork = tuple[tuple[Request, int | None], ...]  # requests and Horovod's handles; None: nothing is sent


def connect(
    hierarchical: bool | str = False,
    timeout: float | None = None,
    *,
    point_to_point: bool = False,
    process_set: Any = None,
) -> Transport:
    """Return a HorovodTransport. If Horovod has no GPU operations, GPU tensors go through pinned host memory.

    Arguments and errors are the same as for HorovodTransport, and with `point_to_point` for PointToPointTransport.
    """
    horovod = HorovodTransport(hierarchical, timeout, process_set)
    transport: Transport = horovod
    built_for_gpu = hvd.cuda_built() or hvd.rocm_built()
    if point_to_point:
        from dgc.comm.mpi import PointToPointTransport  # only this needs mpi4py

        transport, built_for_gpu = PointToPointTransport(horovod), False
    if torch.cuda.is_available() and not built_for_gpu:
        return StagedTransport(transport)
    return transport


class HorovodTransport(GroupedTransport):
    """A transport over Horovod. It initialises Horovod unless that has been done.

    Args:
        hierarchical, timeout: As in `dgc.comm.connect.connect`. None: no limit, or the limit of a running Horovod.
            After an error at the limit the process ends without Horovod's shutdown, which would wait on.
        process_set: The hvd.ProcessSet of the ranks to connect, this one among them. They are numbered from 0, and
            each counts as a machine. None: all ranks.

    Raises:
        LaunchError: The launcher started more ranks than Horovod sees.
        ValueError: `hierarchical` is True, and Horovod was initialised before without dynamic process sets.
    """

    point_to_point = False  # an all-to-all of all ranks takes the place of an Exchange

    def __init__(self, hierarchical: bool | str = False, timeout: float | None = None, process_set: Any = None):
        self.timeout = timeout
        if not hvd.is_initialized():
            check_launcher(os.environ)
            if timeout is not None:
                os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(1, int(timeout / 2))))
                os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(max(1, int(timeout))))
            # Horovod checks for new process sets in every cycle, which costs time on one machine too
            needs_groups = hierarchical is True or (hierarchical == "auto" and may_span_machines(os.environ))
            hvd.init(process_sets="dynamic" if needs_groups else None)
        check_launcher(os.environ, hvd.size())
        if hvd.size() > 2 and _uses_fusion:
            warn(
                "Horovod's fusion is on: with 3 or more ranks its sums depend on timing, so repeated runs differ. "
                "For runs that repeat exactly, set HOROVOD_FUSION_THRESHOLD=0, or import dgc.comm.horovod before "
                "hvd.init()."
            )
        self.rank, self.size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self._process_sets: dict[Group, tuple[Any, list[int]]] = {
            "world": (hvd.global_process_set, list(range(self.size)))
        }
        if process_set is not None:
            self.rank, self.size = process_set.rank(), process_set.size()
            self.local_rank, self.local_size = 0, 1
            self._process_sets = {"world": (process_set, process_set.ranks)}
        can_make_groups = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1"
        if hierarchical is True and not can_make_groups:
            raise ValueError(
                "connect(hierarchical=True) needs process sets, and Horovod was started without: call connect "
                "before hvd.init(), or call hvd.init(process_sets='dynamic')"
            )
        if hierarchical and can_make_groups:
            self._make_groups(only_if_useful=hierarchical == "auto")
        self._addresses = self._exchange_addresses()
        _Ending.register()

    def _make_groups(self, only_if_useful: bool) -> None:
        """Create one process set per machine, and one per local rank across the machines."""
        own = torch.tensor([[hvd.cross_rank(), self.local_rank, self.local_size]], dtype=torch.int64)
        found = hvd.allgather(own, name="dgc.ranks").tolist()
        sizes = {machine: local_size for machine, local_rank, local_size in found if local_rank == 0}
        if only_if_useful and (len(sizes) == 1 or max(sizes.values()) == 1):
            return
        machines: dict[int, list[int]] = {machine: [] for machine in sorted(sizes)}
        for rank, (cross_rank, local_rank, _) in enumerate(found):
            # a cross rank counts only the machines that have a rank with this local rank
            counted = [machine for machine in machines if sizes[machine] > local_rank]
            machines[counted[cross_rank]].append(rank)
        groups = Groups(self.rank, list(machines.values()))
        process_sets: dict[tuple[int, ...], Any] = {tuple(range(self.size)): hvd.global_process_set}
        for kind in ("local", "cross"):
            for members in groups.partition[kind]:
                if tuple(members) not in process_sets:
                    process_sets[tuple(members)] = hvd.add_process_set(members)
            own_members = groups.members[kind]
            self._process_sets[kind] = (process_sets[tuple(own_members)], own_members)
        meet_at_exit()

    def _exchange_addresses(self) -> list[Address | None]:
        """Let other ranks see that this process exists. Returns the addresses of Horovod's ranks."""
        hosts = all_gather_object(self, own := socket.gethostname(), "hosts")
        self._presence = Presence(next((host for host in hosts if host != own), ""))
        addresses: list[Address | None] = [None] * hvd.size()
        found = all_gather_object(self, self._presence.address, "addresses")
        for rank, address in zip(self.members("world"), found, strict=True):
            addresses[rank] = address
        return addresses

    def _explain(self, ranks: Sequence[int]) -> str:
        """Say which of these ranks of Horovod, that this one has waited for, is gone."""
        return explain([rank for rank in ranks if rank != hvd.rank()], self._addresses)

    def in_vain(self, ranks: Sequence[int], what: str) -> RuntimeError:
        """Return the error of a message that these ranks have not sent within the time limit."""
        _Ending.in_vain = True
        return RuntimeError(f"{self._explain(ranks)}. {what} was not complete after {self.timeout:g} seconds")

    def members(self, group: Group) -> list[int]:
        """The ranks of this rank's group of that kind, counted among all of Horovod's."""
        return self._members(group)[1]

    def group_rank(self, group: Group) -> int:
        return self.members(group).index(hvd.rank())

    def _members(self, group: Group) -> tuple[Any, list[int]]:
        if group not in self._process_sets:
            raise ValueError(f"group {group!r} does not exist: use HorovodTransport(hierarchical=True)")
        return self._process_sets[group]

    def launch(self, name: str, requests: Sequence[Request], communicator: str = "") -> HorovodWork:
        if communicator and not all(isinstance(request, AllReduce) for request in requests):
            _cannot_join.add(self)
        return tuple((request, self._start(f"{name}.{i}", request)) for i, request in enumerate(requests))

    def poll(self, work: HorovodWork) -> bool:
        return all(handle is None or hvd.poll(handle) for _, handle in work)

    def wait(self, work: HorovodWork) -> tuple[Reply, ...]:
        return tuple(self._reply(request, handle) for request, handle in work)

    def _start(self, name: str, request: Request) -> int | None:
        process_set, members = self._members(request.group)
        if len(members) == 1 and not isinstance(request, Exchange):
            return None
        match request:
            case AllReduce(tensor, op):
                return hvd.allreduce_async_(tensor, name=name, op=_OPS[op], process_set=process_set)
            case AllGather(tensor):
                return hvd.allgather_async(tensor, name=name, process_set=process_set)
            case ReduceScatter(tensor, op):
                return hvd.reducescatter_async(tensor, name=name, op=_OPS[op], process_set=process_set)
            case Broadcast(tensor, root):
                return hvd.broadcast_async_(tensor, members[root], name=name, process_set=process_set)
            case AllToAll(tensor, splits):
                counts = torch.tensor(splits, dtype=torch.int32)
                return hvd.alltoall_async(tensor, splits=counts, name=name, process_set=process_set)
            case Exchange(sends):
                # Horovod has no point-to-point messages (dgc.comm.mpi has). An all-to-all of bytes replaces them;
                # most of its pieces are empty.
                pieces = [as_bytes(sends[to]) if to in sends else NO_BYTES for to in range(len(members))]
                counts = torch.tensor([p.numel() for p in pieces], dtype=torch.int32)
                return hvd.alltoall_async(torch.cat(pieces), splits=counts, name=name, process_set=process_set)
            case _:
                assert_never(request)

    def _reply(self, request: Request, handle: int | None) -> Reply:
        if handle is None:
            return reply_of_one(request)
        output = self._output(request, handle)
        match request:
            case AllGather():
                return tuple(output.chunk(self.group_size(request.group)))
            case AllToAll():
                received, splits = output
                return tuple(received.split(splits.tolist()))
            case Exchange(_, receives):
                received, splits = output
                pieces = received.split(splits.tolist())
                for source, buffer in receives.items():
                    as_bytes(buffer).copy_(pieces[source])
                return receives
        return output

    def _output(self, request: Request, handle: int) -> Any:
        ranks = self.members(request.group)
        end = None if self.timeout is None else time.monotonic() + self.timeout
        while end is not None and not hvd.poll(handle):
            if time.monotonic() >= end:
                raise self.in_vain(ranks, f"A message of {type(request).__name__}")
            time.sleep(PAUSE)
        try:
            return hvd.synchronize(handle)
        except RuntimeError as error:
            if not any(part in str(error) for part in LOST):  # ranks send what does not fit
                raise
            raise type(error)(f"{self._explain(ranks)}. The network's own message: {error}") from error
