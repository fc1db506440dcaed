"""Process groups of a transport: one per lane and group of ranks.

All groups are created at the same point of the program on every rank, as torch.distributed requires. The groups of
a transport are separate from those of the user, such as the default group that DDP uses.
"""

import contextlib
import os
import socket
from datetime import timedelta
from threading import Thread
from typing import Any

import torch.distributed as dist

from dgc.comm.requests import Group


class Place:
    """The machine and the local rank of each rank. Construction is collective.

    A machine is a host, or one agent of torchrun on a host. The local rank counts within the machine.
    """

    def __init__(self) -> None:
        machines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(machines, (socket.gethostname(), os.environ.get("GROUP_RANK", "")))
        names = list(dict.fromkeys(machines))
        self._rank = dist.get_rank()
        self.machines = [[r for r, machine in enumerate(machines) if machine == name] for name in names]
        local_ranks = range(max(map(len, self.machines)))
        self.across = [[ranks[i] for ranks in self.machines if i < len(ranks)] for i in local_ranks]

    def members(self, group: Group) -> list[int]:
        """Ranks of this rank's group of that kind."""
        return next(ranks for ranks in self.partition(group) if self._rank in ranks)

    def partition(self, group: Group) -> list[list[int]]:
        """Ranks of all groups of that kind."""
        if group == "world":
            return [list(range(dist.get_world_size()))]
        return self.machines if group == "local" else self.across


class Lanes:
    """The process groups of each lane.

    Args:
        place: The groups of ranks.
        kinds: The kinds of groups that requests may name.
        backend: Backend of torch.distributed, such as "gloo" or "cpu:gloo,cuda:nccl".
        timeout: Time after which an operation that some ranks never joined fails.
    """

    def __init__(self, place: Place, kinds: tuple[Group, ...], backend: str, timeout: timedelta):
        self._place, self._kinds, self._backend, self._timeout = place, kinds, backend, timeout
        self._groups: dict[tuple[str, Group], Any] = {}
        self.open("")

    def open(self, lane: str) -> None:
        """Create the groups of a lane. Collective."""
        own: dict[tuple[int, ...], Any] = {}  # two kinds with the same ranks share a group
        for kind in self._kinds:
            for ranks in self._place.partition(kind):
                if tuple(ranks) not in own:
                    own[tuple(ranks)] = dist.new_group(ranks, self._timeout, self._backend)
            self._groups[lane, kind] = own[tuple(self._place.members(kind))]

    def close(self) -> list[Any]:
        """Return the groups, for `destroy`, and give them up."""
        groups = list(self._groups.values())
        self._groups.clear()
        return groups

    def group(self, lane: str, kind: Group) -> Any:
        """The process group.

        Raises:
            ValueError: The transport was created without groups of that kind.
        """
        if kind not in self._kinds:
            raise ValueError(f"group {kind!r} does not exist: use TorchTransport(hierarchical=True)")
        return self._groups[lane, kind]


def destroy(groups: list[Any]) -> None:
    """Destroy process groups that the program has not destroyed itself, and empty the list.

    The threads of a group end with the last reference to it, and may take 0.1 s: all references end at one time.
    """
    threads = []
    while groups:
        reference = [groups.pop(0)]
        if dist.is_initialized():
            with contextlib.suppress(ValueError):  # it does not exist any more
                dist.destroy_process_group(reference[0])
        threads.append(Thread(target=reference.clear))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
