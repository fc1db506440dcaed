"""Reads the files of a checkpoint, and compares them with the manifest."""

import json
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def read_tensors(path: Path) -> Any:
    """Loads a file of `torch.save` onto the CPU. Raises ValueError, with the path, if it cannot be read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be read as a checkpoint: {error}") from error


def fingerprint(path: Path) -> dict[str, int]:
    """Length and CRC-32 of a file. torch.load does not verify the checksums inside its files."""
    crc, length = 0, 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc, length = zlib.crc32(block, crc), length + len(block)
    return {"bytes": length, "crc32": crc}


def check_file(path: Path, expected: Any) -> None:
    """Raises ValueError if `path` is missing or differs from its entry in the manifest."""
    if not path.exists():
        raise ValueError(f"{path} is missing on {socket.gethostname()}")
    found = fingerprint(path)
    if found != expected:
        raise ValueError(f"{path} is not the file that was written: {found} now, {expected} when written")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns {"size": ranks, "files": {name: fingerprint}, "machines": by rank, the number of its replica group}.

    On two levels this is the number of the machine of whose residual the rank had a part.

    Raises ValueError if the manifest is not valid.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        size, files = manifest["size"], manifest["files"]
        # The length is compared first, because a damaged number of ranks may be huge.
        if type(size) is not int or size < 1 or len(files) != size + 1:
            raise ValueError(f"it does not list the files of {size} ranks")
        if files.keys() != {"shared.pt", *(f"rank{rank}.pt" for rank in range(size))}:
            raise ValueError(f"it lists {sorted(files)[:5]}, not the files of {size} ranks")
        machines = manifest.get("machines", list(range(size)))
        if len(machines) != size or {*machines} != {*range(max(machines) + 1)}:
            raise ValueError(f"it has the machines {machines} of {size} ranks")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    return {"size": size, "files": files, "machines": machines}


def reader(folder: Path, manifest: dict[str, Any], size: int) -> Callable[[int], Any]:
    """Function that reads the file of an old rank. size: number of ranks that resume."""

    def read(rank: int) -> Any:
        path = folder / f"rank{rank}.pt"
        try:
            check_file(path, manifest["files"][path.name])
        except ValueError as error:
            if manifest["size"] == size:
                raise
            raise ValueError(f"{error} (needed because {size} ranks resume {manifest['size']})") from None
        return read_tensors(path)

    return read
