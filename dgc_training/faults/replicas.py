"""Replica check: after every step the parameters of all ranks must be equal bit for bit."""

import zlib
from collections import Counter

import torch
from torch import Tensor, nn

from dgc.comm import Transport, all_gather_object


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the tensor's bytes, in order of its logical indices."""
    return zlib.crc32(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def minority_ranks(checksums: list[int | None]) -> list[int]:
    """The ranks that do not have the most frequent value. In a tie, rank 0's value counts as correct."""
    counts = Counter(checksums)
    most_frequent = max(counts, key=lambda value: (counts[value], value == checksums[0]))
    return [rank for rank, value in enumerate(checksums) if value != most_frequent]


def check_replicas(model: nn.Module, transport: Transport) -> None:
    """Checks that all ranks have equal parameters. Collective.

    Buffers are not compared, since batch norm's statistics differ between ranks.

    Raises:
        RuntimeError: on every rank, with the first parameter that differs and the ranks in the minority.
    """
    own = {name: checksum(parameter.detach()) for name, parameter in model.named_parameters()}
    gathered = all_gather_object(transport, own, name="replicas")
    for name in own:
        wrong = minority_ranks([checksums.get(name) for checksums in gathered])
        if wrong:
            ranks = f"rank {wrong[0]} differs" if len(wrong) == 1 else f"ranks {wrong} differ"
            tie = "" if 2 * len(wrong) < len(gathered) else " (no majority: rank 0's value counts as correct)"
            raise RuntimeError(f"replicas differ: parameter {name} of {ranks} from the other ranks'{tie}")
