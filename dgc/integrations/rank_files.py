"""The state of an exchange beside the checkpoint of a trainer: one file for each rank, whose residual differs."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from dgc.comm.collectives import all_gather_object
from dgc.ddp import DDPExchange


def missing(library: str) -> ModuleNotFoundError:
    """What a module of this package raises if its library is not installed."""
    return ModuleNotFoundError(f"dgc.integrations.{library} needs {library}: pip install {library}", name=library)


def save(exchange: DDPExchange, file: Path) -> None:
    """Save this rank's state. Whenever the process ends, the file is complete or not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.unfinished")
    torch.save(exchange.compression_state_dict(), unfinished)
    os.replace(unfinished, file)


def load(exchange: DDPExchange, file_of: Callable[[int], Path]) -> None:
    """Load the state of each rank from `file_of(rank)`. Collective.

    If no rank has a file, compression is new in this run: it begins with nothing unsent, and rank 0 warns.

    Raises:
        ValueError: Only some ranks have a file, on every rank. Or the state belongs elsewhere.
    """
    transport = exchange.transport
    own = file_of(transport.rank)
    there = all_gather_object(transport, own.is_file(), "files_of_the_exchange")
    if not any(there):
        if transport.rank == 0:
            warnings.warn(
                f"{own} is not there, nor that of any other rank: compression begins with nothing unsent. This is "
                "right if the checkpoint was saved without compression. Else what its ranks had not sent is lost",
                stacklevel=3,
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
    exchange.load_compression_state_dict(torch.load(own, map_location="cpu", weights_only=True))
