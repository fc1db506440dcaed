"""Checkpoints on disk. Whatever the moment of a crash, the newest complete one is found and loads.

    checkpoints/e0004/shared.pt         what all ranks have in common, written by rank 0
    checkpoints/e0004/rank0.pt ...      what is each rank's own
    checkpoints/e0004/manifest.json     number of ranks, and every file's size
    checkpoints/latest.json, best.json  the name of a complete checkpoint

Every file is written beside its place, flushed to the disk and renamed into it. `latest.json` is replaced
only after every rank has written its part, so it never names a half-written checkpoint. The last three, the
latest and the best are kept. Loading runs no code from the file (`weights_only`).

Ranks on several machines need not share the file system: each finds its own rank's file where it wrote it,
and rank 0 sends the shared part and every decision to the others.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dgc.comm import Transport, all_gather_object, barrier, broadcast_object
from training.failure import Refused


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a file beside `path`, flushes it to the disk and renames it to `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """Replaces `path` by `content` as JSON, atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(json.dumps(content, indent=2) + "\n"))


def read_tensors(path: Path) -> Any:
    """What `torch.save` wrote to `path`, on the CPU; ValueError that names the file if it cannot be read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be read as a checkpoint: {error}") from error


def checkpoint_name(epoch: int, step: int = 0) -> str:
    """Name of the checkpoint after `epoch` whole epochs and `step` steps of the next: e0004, e0004s00120."""
    return f"e{epoch:04d}" + (f"s{step:05d}" if step else "")


def _age(folder: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", folder.name)]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint as one rank sees it. `own` is None where it was saved by another number of ranks."""

    name: str
    size: int
    shared: dict[str, Any]
    own: dict[str, Any] | None


class Checkpoints:
    """The checkpoints of one run. `save` and `load` are collective: every rank calls them together."""

    def __init__(self, directory: Path, transport: Transport, keep: int = 3) -> None:
        self.directory = directory
        self.transport = transport
        self.keep = keep

    def save(self, name: str, shared: dict[str, Any], own: dict[str, Any], best: bool = False) -> None:
        """Writes a checkpoint and makes it the latest, and if asked the best. `shared` is rank 0's."""
        folder = self.directory / name
        folder.mkdir(parents=True, exist_ok=True)
        rank, size = self.transport.rank, self.transport.size
        own_path, shared_path = folder / f"rank{rank}.pt", folder / "shared.pt"
        write_atomically(own_path, lambda path: torch.save(own, path))
        sizes = {own_path.name: own_path.stat().st_size}
        if rank == 0:
            write_atomically(shared_path, lambda path: torch.save(shared, path))
            sizes[shared_path.name] = shared_path.stat().st_size
        # Also the barrier: no rank's part is missing when the names below are written.
        parts = all_gather_object(self.transport, sizes, name="checkpoint.sizes")
        if rank == 0:
            files = {file: length for part in parts for file, length in part.items()}
            write_json(folder / "manifest.json", {"size": size, "files": files})
            write_json(self.directory / "latest.json", {"checkpoint": name})
            if best:
                write_json(self.directory / "best.json", {"checkpoint": name})
        barrier(self.transport, name="checkpoint.named")
        self._prune()
        # No rank begins the next checkpoint while another still removes what it does not know.
        barrier(self.transport, name="checkpoint.pruned")

    def _prune(self) -> None:
        """Removes all but the last `keep`, the latest and the best; one rank of each file system does the
        work.
        """
        if self.transport.local_rank != 0:
            return
        kept = {self._named("latest"), self._named("best")}
        folders = sorted((path for path in self.directory.iterdir() if path.is_dir()), key=_age)
        complete = [path for path in folders if (path / "manifest.json").exists()] or folders
        kept.update(path.name for path in complete[-self.keep :])
        for folder in folders:
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def _named(self, which: str) -> str | None:
        try:
            content = json.loads((self.directory / f"{which}.json").read_text())
            return Path(str(content["checkpoint"])).name
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ValueError(f"{self.directory / which}.json cannot be read: {error}") from error

    def find(self, *which: str) -> str | None:
        """Name of the first of `which` ('best', 'latest') that there is. Rank 0 looks, every rank gets its
        answer.
        """
        found, problem = None, None
        if self.transport.rank == 0:
            try:
                found = next((name for name in map(self._named, which) if name is not None), None)
            except ValueError as error:
                problem = str(error)
        found, problem = broadcast_object(self.transport, (found, problem), name="checkpoint.find")
        if problem is not None:
            raise Refused(problem)
        return found

    def load(self, name: str) -> Loaded:
        """Reads checkpoint `name`. If any rank cannot read its part, every rank raises the same `Refused`."""
        shared, size, own, problem = None, 0, None, None
        folder = self.directory / name
        if self.transport.rank == 0:
            try:
                size = self._checked_size(folder)
                shared = read_tensors(folder / "shared.pt")
            except (ValueError, OSError) as error:
                problem = str(error)
        shared, size = broadcast_object(self.transport, (shared, size), name="checkpoint.shared")
        if size == self.transport.size:
            try:
                own = read_tensors(folder / f"rank{self.transport.rank}.pt")
            except ValueError as error:
                problem = problem or str(error)
        problems = [
            text for text in all_gather_object(self.transport, problem, name="checkpoint.problem") if text
        ]
        if problems:
            raise Refused(
                f"checkpoint {folder} is damaged: {problems[0]}. --no-resume starts anew and keeps it aside."
            )
        return Loaded(name, size, shared, own)

    def _checked_size(self, folder: Path) -> int:
        """Number of ranks that saved it; ValueError if a file that is here has not the length it had then."""
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
            size, files = int(manifest["size"]), dict(manifest["files"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / 'manifest.json'} cannot be read: {error}") from error
        for file, length in files.items():
            path = folder / Path(file).name
            if path.exists() and path.stat().st_size != length:
                raise ValueError(f"{path} has {path.stat().st_size} bytes, {length} were written")
        return size
