"""What ranks have not sent, in a folder of torch.distributed.checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dgc.warn import warn

METADATA = ".metadata"  # torch.distributed.checkpoint writes it last


class Kept(Protocol):
    """What `compress` and `quantize` return."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def state_for(self, sizes: Mapping[str, Sequence[int]]) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any) -> None: ...


def _of_each_rank(own: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def save_state(exchange: Kept, folder: str | Path) -> None:
    """Save in `folder` what no rank has sent yet, of `compress` or `quantize`. Collective.

    Example:
        >>> from tempfile import mkdtemp
        >>> from torch.distributed.fsdp import fully_shard
        >>> from dgc.fsdp import quantize, save_state
        >>> quantizer = quantize(fully_shard(model), gradients=8)
        >>> save_state(quantizer, mkdtemp())
    """
    dcp.save(dict(exchange.state_dict()), checkpoint_id=folder)


def load_state(exchange: Kept, folder: str | Path) -> None:
    """Load what `save_state` has saved. Collective.

    A run continues bit for bit on the same ranks. On another number, every rank of `quantize` gets the mean error,
    and `compress` divides what is not sent among other shards and other replicas. If no rank finds the folder,
    compression is new in this run: it begins without an error, and rank 0 warns.

    Raises:
        ValueError: On every rank, if only some ranks find the folder, or its content cannot be read or used.
    """
    there = _of_each_rank(Path(folder, METADATA).is_file())
    if not any(there):
        if dist.get_rank() == 0:
            warn(
                f"{folder} is not there: compression begins with nothing unsent. This is right if the checkpoint "
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
        state = exchange.state_for({key: tuple(getattr(entry, "size", ())) for key, entry in saved.items()})
        dcp.load(state, checkpoint_id=folder)
        problem = ""
    except CheckpointException as error:  # on all ranks
        causes = {f"{type(cause[0]).__name__}: {cause[0]}" for cause in error.failures.values()}
        problem = f"{folder} cannot be loaded ({'; '.join(sorted(causes))})"
    if problem:
        raise ValueError(f"{problem}: resume from an older checkpoint, or one that was saved with these settings")
    exchange.load_state_dict(state)
