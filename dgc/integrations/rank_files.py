"""The state of an exchange beside the checkpoint of a trainer: one file for each rank, whose residual differs."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch

from dgc.comm.collectives import all_gather_object
from dgc.comm.meeting import meet
from dgc.comm.transport import Transport
from dgc.ddp import DDPExchange
from dgc.engine.state import HasCompression
from dgc.warn import warn

ON_EVERY_RANK = (
    "Save and load checkpoints on all ranks: the trainer itself writes its shared files on rank 0 alone"
)


def missing(library: str) -> ModuleNotFoundError:
    """What a module of this package raises if its library is not installed."""
    return ModuleNotFoundError(f"dgc.integrations.{library} needs {library}: pip install {library}", name=library)


def file_name(name: str, rank: int) -> str:
    """The name of a rank's file in a folder with a checkpoint. name: The name of the exchange."""
    return f"{name}{rank}.pt"


def first_problem(transport: Transport, act: Callable[[], object]) -> tuple[int, str] | None:
    """Call `act`. Return the first rank on which it raised an exception, with the exception as text. Collective.

    Otherwise the other ranks would go on, and wait for this one in their next step.
    """
    problem = ""
    try:
        act()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".removesuffix(": ")
    found = all_gather_object(transport, problem, "state_of_the_exchange")
    return next(((rank, text) for rank, text in enumerate(found) if text), None)


def save(exchange: DDPExchange, file_of: Callable[[int], Path]) -> None:
    """Save the state of each rank in `file_of(rank)`. Collective.

    Whenever the process ends, a file is complete or not there.

    Raises:
        RuntimeError: On every rank, if one cannot save its state.
    """
    meet(exchange.transport, "the trainer's saving of a checkpoint", ON_EVERY_RANK)
    file = file_of(exchange.transport.rank)

    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f"{file.name}.unfinished")
        torch.save(exchange.compression_state_dict(), unfinished)
        os.replace(unfinished, file)

    if found := first_problem(exchange.transport, write):
        rank, problem = found
        raise RuntimeError(f"rank {rank} cannot save what it has not sent in {file_of(rank)}: {problem}")


def load(exchange: DDPExchange, file_of: Callable[[int], Path]) -> None:
    """Load the state of each rank from `file_of(rank)`. Collective.

    If no rank has a file, compression is new in this run: it begins with nothing unsent, and rank 0 warns.

    Raises:
        ValueError: On every rank, if only some ranks have a file, or one rank cannot read or use its own.
    """
    transport = exchange.transport
    meet(transport, "the trainer's loading of a checkpoint", ON_EVERY_RANK)
    own = file_of(transport.rank)
    there = all_gather_object(transport, own.is_file(), "files_of_the_exchange")
    if not any(there):
        if transport.rank == 0:
            warn(
                f"{own} is not there, nor any other rank's file: compression begins with nothing unsent. This is "
                "right if the checkpoint was saved without compression. Else what its ranks had not sent is lost"
            )
        return
    if not all(there):
        lacking = [rank for rank, has in enumerate(there) if not has]
        raise ValueError(
            f"rank {lacking[0]} has no file {file_of(lacking[0])}, and other ranks have theirs: the checkpoint is "
            f"incomplete (of {len(there)} ranks {len(lacking)} lack a file), or it was saved by fewer ranks. "
            "Resume from an older one, or with as many ranks. For another number of ranks convert the files with "
            "dgc.optim.redistribute (page Checkpoints of the documentation)"
        )
    load_on_every_rank(exchange, transport, partial(read_state, own), lambda rank: str(file_of(rank)))


def read_state(file: Any) -> Any:
    """Load a file of `torch.save` onto the CPU, after a comparison with its checksums, which torch.load ignores.

    Raises:
        ValueError: A part of it has changed.
    """
    with ZipFile(file) as parts:
        if changed := parts.testzip():
            raise ValueError(f"the checksum of its part {changed} is another one")
    if not isinstance(file, Path):
        file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def load_on_every_rank(
    exchange: HasCompression, transport: Transport, read: Callable[[], Any], name_of: Callable[[int], str]
) -> None:
    """Load what `read` returns on each rank. Collective.

    name_of: Where the state of a rank was saved, for messages. Raises ValueError on every rank, with the rank and
    this name, if one cannot read or use its state. Nothing is loaded unless all ranks have read theirs.
    """
    states: list[Any] = []
    if found := first_problem(transport, lambda: states.append(read())):
        rank, problem = found
        reason = problem.splitlines()[0].split(". ")[0]  # torch goes on with advice to run code of the file
        raise ValueError(
            f"rank {rank} cannot read {name_of(rank)}, which is damaged ({reason}): resume from an older one"
        )
    if found := first_problem(transport, lambda: exchange.load_compression_state_dict(states[0])):
        rank, problem = found
        raise ValueError(f"rank {rank} cannot use {name_of(rank)}: {problem.removeprefix('ValueError: ')}")
