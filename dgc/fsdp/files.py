"""The error of `dgc.fsdp.quantize` in a folder of torch.distributed.checkpoint."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dgc.fsdp.quantized import FSDPQuantizer
from dgc.warn import warn

METADATA = ".metadata"  # torch.distributed.checkpoint writes it last


def _of_each_rank(own: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def save_state(quantizer: FSDPQuantizer, folder: str | Path) -> None:
    """Save the error of all ranks in `folder`. Collective.

    Example:
        >>> from tempfile import mkdtemp
        >>> from torch.distributed.fsdp import fully_shard
        >>> from dgc.fsdp import quantize, save_state
        >>> quantizer = quantize(fully_shard(model), gradients=8)
        >>> save_state(quantizer, mkdtemp())
    """
    dcp.save(quantizer.state_dict(), checkpoint_id=folder)


def load_state(quantizer: FSDPQuantizer, folder: str | Path) -> None:
    """Load the error of all ranks from `folder`. Collective.

    A run continues bit for bit on the same number of ranks. On another number, every rank gets the mean error. If
    no rank finds the folder, quantization is new in this run: it begins without an error, and rank 0 warns.

    Raises:
        ValueError: On every rank, if only some ranks find the folder, or its content cannot be read or used.
    """
    there = _of_each_rank(Path(folder, METADATA).is_file())
    if not any(there):
        if dist.get_rank() == 0:
            warn(
                f"{folder} is not there: quantization begins with nothing unsent. This is right if the checkpoint "
                "was saved without it. Else what its ranks had not sent is lost"
            )
        return
    if not all(there):
        raise ValueError(
            f"rank {there.index(False)} does not find {folder}, and other ranks do: all ranks read one folder, so "
            "put checkpoints on a disk that all machines share"
        )
    try:
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        rows = {getattr(entry, "size", [0])[0] for key, entry in saved.items() if key.startswith("ranks.")}
        state = quantizer.state_dict(of_each_rank=rows == {dist.get_world_size()})
        dcp.load(state, checkpoint_id=folder)
        problem = ""
    except CheckpointException as error:  # on all ranks
        causes = {f"{type(cause[0]).__name__}: {cause[0]}" for cause in error.failures.values()}
        problem = f"{folder} cannot be loaded ({'; '.join(sorted(causes))})"
    if problem:
        raise ValueError(f"{problem}: resume from an older checkpoint, or one that was saved with these settings")
    quantizer.load_state_dict(state)
