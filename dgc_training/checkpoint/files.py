"""Checkpoints on disk. After a crash at any moment, the newest complete checkpoint can be found and loaded.

    checkpoints/e0004/shared.pt         the state common to all ranks, written by rank 0
    checkpoints/e0004/rank0.pt ...      the state of each rank
    checkpoints/e0004/manifest.json     number of ranks, and length and CRC-32 of every file
    checkpoints/latest.json, best.json  the name of a complete checkpoint

Every file is written under a temporary name in its folder, flushed to the disk and renamed. `latest.json` is
replaced only after every rank has written its part, so it never names an incomplete checkpoint. The last three
checkpoints, the latest and the best are kept. Loading runs no code from the file (`weights_only`). A file that
differs from its manifest is refused.

Ranks on several machines need no shared file system: each rank reads the file that it wrote, and rank 0 sends the
shared part and every decision to the others. A different number of ranks reads the files of the old ranks that it
takes the residual from (`dgc.engine.redistribute`), so they must be readable.
"""

import json
import re
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dgc.comm import Transport, all_gather_object, barrier, broadcast_object
from dgc.engine.redistribute import FixedSize, share_of
from dgc.optim import ResidualPart
from dgc_training.atomic_write import write_atomically, write_json
from dgc_training.checkpoint.reading import check_file, fingerprint, read_manifest, read_tensors, reader
from dgc_training.checkpoint.replica_groups import ReplicaGroups, read_replica_groups
from dgc_training.faults.failure import RESUMES, UsageError


def checkpoint_name(epoch: int, step: int = 0) -> str:
    """Name of the checkpoint after `epoch` epochs and `step` steps of the next one: e0004, e0004s00120."""
    return f"e{epoch:04d}" + (f"s{step:05d}" if step else "")


def _sort_key(folder: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", folder.name)]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint as loaded on one rank.

    If it was saved on a different number of ranks, `own` has only "compression": this rank's share of their
    residual. redistributed: whether `own["compression"]` comes from other ranks or machines. replica_groups: which
    ranks stay, are lost or join, if replica groups can join.
    """

    name: str
    size: int
    shared: dict[str, Any]
    own: dict[str, Any]
    redistributed: bool = False
    replica_groups: ReplicaGroups | None = None


class Checkpoints:
    """The last `keep` checkpoints of one run, the latest and the best. `save`, `find` and `load` are collective.

    Args:
        wait: seconds until a difference between the machines is an error. A network file system may show an old
            file for some seconds.
    """

    def __init__(self, directory: Path, transport: Transport, keep: int = 3, wait: float = 30.0) -> None:
        self.directory = directory
        self.transport = transport
        self.keep, self.wait = keep, wait

    def save(
        self,
        name: str,
        shared: dict[str, Any],
        own: dict[str, Any],
        best: bool = False,
        replica_group: int | None = None,
    ) -> None:
        """Writes a checkpoint and marks it as the latest, and as the best if `best`. Rank 0's `shared` is used.

        replica_group: the number of this rank's replica group, as in `load`.
        """
        rank, size = self.transport.rank, self.transport.size
        name = broadcast_object(self.transport, self._unused_name(name), name="checkpoint.name")
        folder = self.directory / name
        part = part_of(own)
        group = part["machine"] if part is not None else rank if replica_group is None else replica_group
        written: dict[str, Any] = {}
        kept: set[str | None] | None = None
        problem: str | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file, content in {f"rank{rank}.pt": own, **({"shared.pt": shared} if rank == 0 else {})}.items():
                write_atomically(folder / file, partial(torch.save, content))
                written[file] = fingerprint(folder / file)
        except OSError as error:
            problem = str(error)
        # This is also a barrier: all ranks have written their parts when the names below are written.
        written_by = all_gather_object(self.transport, (written, group, problem), name="checkpoint.files")
        self._refuse([problem for *_, problem in written_by])
        if rank == 0:
            manifest: dict[str, Any] = {"size": size, "files": {}}
            for entries, _, _ in written_by:
                manifest["files"] |= entries
            groups = [group for _, group, _ in written_by]
            if part is not None or groups != list(range(size)):
                manifest["machines"] = groups
            try:
                write_json(folder / "manifest.json", manifest)
                write_json(self.directory / "latest.json", {"checkpoint": name})
                if best:
                    write_json(self.directory / "best.json", {"checkpoint": name})
                kept = self._kept()
            except OSError as error:
                problem = str(error)
        # Other machines may have neither names nor manifests, so rank 0 decides.
        kept, problem = broadcast_object(self.transport, (kept, problem), name="checkpoint.kept")
        self._refuse([problem])
        self._remove_others(kept)
        # No rank may begin the next checkpoint while another one still removes old folders.
        barrier(self.transport, name="checkpoint.pruned")

    def _refuse(self, problems: Sequence[str | None]) -> None:
        """Raises UsageError on every rank if one could not write: after a restart it could not write either."""
        for problem in problems:
            if problem is not None:
                raise UsageError(f"the checkpoint cannot be written: {problem}. {RESUMES}")

    def _unused_name(self, name: str) -> str:
        """Returns `name`, with a number appended if the latest or the best checkpoint already has this name.

        A run that is resumed mid-epoch on a different number of ranks can reach the same step again.
        """
        taken = {self._read_name("latest"), self._read_name("best")} if self.transport.rank == 0 else set()
        number, free = 1, name
        while free in taken and (self.directory / free / "manifest.json").exists():
            number += 1
            free = f"{name}-{number}"
        return free

    def _kept(self) -> set[str | None]:
        """Names of the last `keep` checkpoints, the latest and the best."""
        complete = sorted((path.parent for path in self.directory.glob("*/manifest.json")), key=_sort_key)
        last = {path.name for path in complete[-self.keep :]}
        return {self._read_name("latest"), self._read_name("best"), *last}

    def _remove_others(self, kept: set[str | None]) -> None:
        """Removes all checkpoints without one of these names. One rank per machine does this."""
        if self.transport.local_rank == 0:
            for folder in self.directory.iterdir():
                if folder.is_dir() and folder.name not in kept:
                    shutil.rmtree(folder, ignore_errors=True)

    def _read_name(self, which: str) -> str | None:
        try:
            content = json.loads((self.directory / f"{which}.json").read_text())
            return Path(str(content["checkpoint"])).name
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ValueError(f"{self.directory / which}.json cannot be read: {error}") from error

    def find(self, *which: str) -> str | None:
        """Name of the first of `which` ('best', 'latest') that exists, as read by rank 0.

        Raises:
            UsageError: if a name cannot be read, or if another rank reads another one. The ranks were then on
                other machines when the run was saved, and the run directory is not shared.
        """
        deadline = time.monotonic() + self.wait
        while True:
            found = self._found_on_all_ranks(which)
            first = found[0][1]
            # Without a shared directory only the machine of rank 0 has the names.
            other = next(((host, name) for host, name in found if name not in (None, first)), None)
            # Every rank has the same list, and rank 0's clock decides.
            if other is None or broadcast_object(
                self.transport, time.monotonic() > deadline, name="checkpoint.deadline"
            ):
                break
            time.sleep(0.5)
        if other is not None:
            raise UsageError(
                f"{self.directory} differs between the machines: {found[0][0]}, where rank 0 is now, has "
                f"{f'the checkpoint {first}' if first else 'no checkpoint'}, and {other[0]} has {other[1]}. "
                "If ranks move between machines, all machines must share the run directory: set --run-dir. "
                "To go on nevertheless, remove the latest.json and best.json that are out of date."
            )
        return first

    def _found_on_all_ranks(self, which: Sequence[str]) -> list[tuple[str, str | None]]:
        """(host, name that `find` looks for) of each rank."""
        name, problem = None, None
        try:
            # Both are read, so that a damaged one is reported now and not after an epoch.
            names = {known: self._read_name(known) for known in ("latest", "best")}
            name = next((names[wanted] for wanted in which if names[wanted] is not None), None)
        except ValueError as error:
            problem = str(error)
        views = all_gather_object(self.transport, (socket.gethostname(), name, problem), name="checkpoint.find")
        for _, _, text in views:
            if text is not None:
                raise UsageError(text)
        return [(host, found) for host, found, _ in views]

    def load(
        self, name: str, own_part: bool = True, part: ResidualPart | None = None, replica_group: int | None = None
    ) -> Loaded:
        """Reads checkpoint `name`. If any rank cannot read its part, every rank raises the same `UsageError`.

        own_part=False reads only the shared part, for evaluation on any number of ranks; `own` is then empty.
        part: the part of the residual that the optimizer needs.
        replica_group: the number of this rank's replica group, if groups keep their states while others are lost
        or join (see `replica_groups.py`). None: they do not.
        """
        own: dict[str, Any] = {}
        shared, manifest, problem, redistributed, replica_groups = None, None, None, False, None
        folder = self.directory / name
        if self.transport.rank == 0:
            try:
                manifest = read_manifest(folder)
                check_file(folder / "shared.pt", manifest["files"]["shared.pt"])
                shared = read_tensors(folder / "shared.pt")
            except (ValueError, OSError) as error:
                manifest, problem = None, f"is damaged: {error}"
        shared, manifest = broadcast_object(self.transport, (shared, manifest), name="checkpoint.shared")
        if manifest is not None and own_part and replica_group is not None:
            read = reader(folder, manifest, self.transport.size)
            own, replica_groups, problem = read_replica_groups(
                folder, manifest, replica_group, read, self.transport
            )
        elif manifest is not None and own_part:
            try:
                own, redistributed = self._read_own(folder, manifest, part)
            except FixedSize as error:
                problem = str(error)
            except (ValueError, OSError) as error:
                problem = f"is damaged: {error}"
        problems = [text for text in all_gather_object(self.transport, problem, name="checkpoint.problem") if text]
        if problems:
            raise UsageError(f"checkpoint {folder} {problems[0]}. --no-resume renames this run and starts again.")
        return Loaded(name, manifest["size"], shared, own, redistributed, replica_groups)

    def _read_own(
        self, folder: Path, manifest: dict[str, Any], part: ResidualPart | None
    ) -> tuple[dict[str, Any], bool]:
        """Returns this rank's part, and whether its residual comes from other ranks or machines."""
        rank, size = self.transport.rank, self.transport.size
        read = reader(folder, manifest, size)
        own: dict[str, Any] = read(rank) if manifest["size"] == size else {}
        if manifest["size"] == size and part_of(own) == part:
            return own, False

        def read_compression(old: int) -> dict[str, Any]:
            content = read(old)
            if not isinstance(content, dict) or not isinstance(content.get("compression"), dict):
                raise ValueError(f"rank{old}.pt has no residual")
            return content["compression"]

        try:
            compression = share_of(read_compression, manifest["machines"], rank, size, part)
        except FixedSize as error:
            raise FixedSize(
                f"was saved by {manifest['size']} ranks and cannot be resumed by {size}: {error}. Start "
                f"{manifest['size']} ranks, or resume from a checkpoint after an epoch"
            ) from error
        return {**own, "compression": compression}, True


def part_of(own: Any) -> ResidualPart | None:
    """The part of a machine's residual in a rank's file; None if the rank has a residual of its own."""
    compression = own.get("compression") if isinstance(own, dict) else None
    return compression.get("part") if isinstance(compression, dict) else None
