"""The states of replica groups that may be lost, join and return, each with a state of its own (`dgc.local`).

A replica group is a rank, or the ranks of a machine that have one model together. A group that stays keeps the
state that it has saved, unchanged. The state of a group that is lost is lost too. A group without a state, because
it is new or its disk is, joins: each of its ranks gets the state of its counterpart in another group, and the
optimizer leaves out what belongs to that group alone (`Wrapper.join`). The files need not be on a disk of all
machines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgc.comm import Transport, all_gather_object, broadcast_object
from dgc_training.checkpoint.reading import fingerprint


@dataclass(frozen=True)
class ReplicaGroups:
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
        parts = [f"ranks {joined} join with the common model and without a residual"] if joined else []
        parts += [f"the models and residuals of the old ranks {lost} are lost"] if lost else []
        return "; ".join(["all others keep their own model and residual", *parts])


@dataclass(frozen=True)
class Files:
    """Which files of old ranks a machine has.

    A checkpoint may have the name of an earlier one, which a run had left behind when it resumed from a checkpoint
    before it. A machine that was not there then has files of the earlier one.

    Attributes:
        found: Old ranks whose files exist.
        valid: Those that are known to be the ones of the manifest.
        stale: Those that are known to be others.
    """

    found: set[int]
    valid: set[int]
    stale: set[int]

    @staticmethod
    def of(folder: Path, manifest: Mapping[str, Any], rank: int) -> "Files":
        """Look at the folder. All files are compared only if the file of `rank` is not valid: it takes long."""
        names = {old: folder / f"rank{old}.pt" for old in range(manifest["size"])}
        found = {old for old, path in names.items() if path.exists()}

        def matches(old: int) -> bool:
            try:
                return fingerprint(names[old]) == manifest["files"][names[old].name]
            except OSError:
                return False

        if rank in found and matches(rank):
            return Files(found, {rank}, set())
        valid = {old for old in found if matches(old)}
        return Files(found, valid, found - valid)


def members(groups: Sequence[int]) -> list[list[int]]:
    """The ranks of each replica group, given the replica group of each rank."""
    return [[rank for rank, group in enumerate(groups) if group == i] for i in range(max(groups) + 1)]


def assign(readable: Sequence[set[int]], old: Sequence[int], new: Sequence[int] | None = None) -> ReplicaGroups:
    """Choose an old group for each new one: its own number if possible, otherwise one that its ranks can read.

    Args:
        readable: By new rank, the old ranks whose files its machine has.
        old, new: By old and by new rank, the number of its group. None: each rank is one. All groups
            have one size.
    """
    ours = members(range(len(readable)) if new is None else new)
    theirs = members(old)

    def can_continue(i: int, j: int) -> bool:
        return all(their in readable[our] for our, their in zip(ours[i], theirs[j], strict=True))

    chosen = [i if i < len(theirs) and can_continue(i, i) else None for i in range(len(ours))]
    for i in range(len(ours)):
        free = [j for j in range(len(theirs)) if j not in chosen and can_continue(i, j)]
        if chosen[i] is None and free:
            chosen[i] = free[0]
    continues: list[int | None] = [None] * len(readable)
    for ranks, j in zip(ours, chosen, strict=True):
        for place, rank in enumerate(ranks):
            continues[rank] = None if j is None else theirs[j][place]
    return ReplicaGroups(tuple(continues), len(old))


def read_replica_groups(
    folder: Path,
    manifest: Mapping[str, Any],
    replica_group: int,
    read: Callable[[int], dict[str, Any]],
    transport: Transport,
) -> tuple[dict[str, Any], ReplicaGroups | None, str | None]:
    """This rank's state, which ranks stay, and why the state cannot be read. Collective.

    The state is empty if it cannot be read. The state of a rank that joins, or continues one of another number,
    has only "compression".

    Args:
        folder: The checkpoint.
        manifest: See `read_manifest`.
        replica_group: The number of this rank's replica group.
        read: Returns the saved state of an old rank, or raises ValueError or OSError.
        transport: Connects the new ranks.
    """
    old: Sequence[int] = manifest["machines"]
    files = Files.of(folder, manifest, transport.rank)
    views = all_gather_object(transport, (files, replica_group), name="checkpoint.readable")
    valid = {rank for files, _ in views for rank in files.valid}
    # A file that is damaged, and valid on no machine, counts as found, so that reading it ends the run.
    readable = [files.found - (files.stale & valid) for files, _ in views]
    new = [its for _, its in views]
    ours, theirs = members(new), members(old)
    if {len(ranks) for ranks in ours} != {len(ranks) for ranks in theirs}:
        sizes = [", ".join(str(len(ranks)) for ranks in groups) for groups in (theirs, ours)]
        differs = f"was saved by groups of {sizes[0]} ranks and cannot be resumed by groups of {sizes[1]}"
        return {}, None, f"{differs}: start as many ranks on each machine as before"
    groups = assign(readable, old, new)
    own, problem = _read_own(groups, read, transport)
    givers = next((ranks for ranks in ours if groups.continues[ranks[0]] is not None), None)
    if givers is None:
        return {}, groups, "is incomplete: no machine has the file of a rank, such as rank0.pt"
    if groups.joined:
        place = ours[replica_group].index(transport.rank)
        for i, giver in enumerate(givers):
            given = broadcast_object(transport, own.get("compression"), giver, name="checkpoint.given")
            if transport.rank in groups.joined and i == place:
                own = {"compression": given}
    return own, groups, problem


def _read_own(
    groups: ReplicaGroups, read: Callable[[int], dict[str, Any]], transport: Transport
) -> tuple[dict[str, Any], str | None]:
    """The state of the old rank that this one continues, and why it cannot be read."""
    old = groups.continues[transport.rank]
    if old is None:
        return {}, None
    try:
        own = read(old)
        if old != transport.rank or groups.old_size != transport.size:
            own = {"compression": own["compression"]}
    except (ValueError, OSError, KeyError, TypeError) as error:
        return {}, f"is damaged: {error}"
    return own, None
