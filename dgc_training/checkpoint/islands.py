"""The states of ranks that may be lost, join and return, each with a state of its own (`dgc.outer`).

A rank that stays keeps the state that it has saved, unchanged. The state of a rank that is lost is lost too. A
rank without a state, because it is new or its disk is, joins: it gets the state of another rank, and its optimizer
leaves out what is that rank's own (`Wrapper.join`). The files need not be on a disk that all machines share.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgc.comm import Transport, all_gather_object, broadcast_object


@dataclass(frozen=True)
class Islands:
    """Which of the old ranks each new rank continues.

    Attributes:
        continues: By new rank, the number of an old rank. None: it joins.
        old_size: Number of ranks that saved the checkpoint.
    """

    continues: tuple[int | None, ...]
    old_size: int

    @property
    def joined(self) -> list[int]:
        """The new ranks that join."""
        return [rank for rank, old in enumerate(self.continues) if old is None]

    @property
    def lost(self) -> list[int]:
        """The old ranks whose states are lost."""
        return sorted(set(range(self.old_size)) - set(self.continues))

    def __str__(self) -> str:
        joined, lost = (", ".join(map(str, ranks)) for ranks in (self.joined, self.lost))
        parts = [f"ranks {joined} join with the common model and without error state"] if joined else []
        parts += [f"the models and error states of the old ranks {lost} are lost"] if lost else []
        return "; ".join(["all others keep their own model and error state", *parts])


def assign(readable: Sequence[set[int]], old_size: int) -> Islands:
    """Choose an old rank for each new rank: its own number if possible, otherwise one that it can read.

    Args:
        readable: By new rank, the old ranks whose files its machine has.
        old_size: Number of ranks that saved the checkpoint.
    """
    continues = [rank if rank in files else None for rank, files in enumerate(readable)]
    for rank, files in enumerate(readable):
        free = sorted(files - set(continues))
        if continues[rank] is None and free:
            continues[rank] = free[0]
    return Islands(tuple(continues), old_size)


def read_islands(
    folder: Path, old_size: int, read: Callable[[int], dict[str, Any]], transport: Transport
) -> tuple[dict[str, Any], Islands, str | None]:
    """This rank's state, which ranks stay, and why the state cannot be read. Collective.

    The state is empty if it cannot be read. That of a rank that joins, or continues one of another number, has
    only "compression".

    Args:
        folder: The checkpoint.
        old_size: Number of ranks that saved it.
        read: Returns the saved state of an old rank, or raises ValueError or OSError.
        transport: Connects the new ranks.
    """
    found = {rank for rank in range(old_size) if (folder / f"rank{rank}.pt").exists()}
    islands = assign(all_gather_object(transport, found, name="checkpoint.readable"), old_size)
    own: dict[str, Any] = {}
    problem, old = None, islands.continues[transport.rank]
    if old is not None:
        try:
            own = read(old)
            if old != transport.rank or old_size != transport.size:
                own = {"compression": own["compression"]}
        except (ValueError, OSError, KeyError, TypeError) as error:
            problem = f"is damaged: {error}"
    giver = next((rank for rank, old in enumerate(islands.continues) if old is not None), None)
    if giver is None:
        return {}, islands, "is incomplete: no machine has the file of a rank, such as rank0.pt"
    if islands.joined:
        given = broadcast_object(transport, own.get("compression"), giver, name="checkpoint.given")
        if transport.rank in islands.joined:
            own = {"compression": given}
    return own, islands, problem
