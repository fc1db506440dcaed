"""Comparison of the machines' models before the first step: FSDP2 does not broadcast parameters."""

from collections.abc import Sequence
from zlib import crc32

from torch import Tensor

from dgc.comm.collectives import all_gather_object
from dgc.comm.requests import as_bytes
from dgc.comm.transport import Transport
from dgc.fsdp.mesh import machines
from dgc.fsdp.shards import ParameterGroup


def check_equal_models(groups: Sequence[ParameterGroup], transport: Transport, name: str) -> None:
    """Compare the parameters of all machines. Collective.

    Args:
        groups: The parameters.
        transport: Connects all ranks.
        name: Name of the message.

    Raises:
        ValueError: A parameter differs. Raised on every rank.
    """
    own = {
        n: _digest(p.to_local()) for group in groups for n, p in zip(group.names, group.parameters, strict=True)
    }
    digests = all_gather_object(transport, own, name)
    first, *others = machines(transport)
    for machine, ranks in enumerate(others, 1):
        for mine, other in zip(first, ranks, strict=True):
            for parameter, digest in digests[mine].items():
                if digests[other][parameter] != digest:
                    raise ValueError(
                        f"{parameter} differs between machines 0 and {machine} before the first step: initialise "
                        "the model with the same seed on every rank, or load a checkpoint"
                    )


def _digest(tensor: Tensor) -> int:
    return crc32(as_bytes(tensor.detach().cpu().contiguous()).numpy().data)
