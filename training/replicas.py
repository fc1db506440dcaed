"""Replicas check: after every step all ranks must hold the same parameters, to the last bit."""

import zlib

import torch
from torch import Tensor, nn

from dgc.comm import Transport, all_gather_object


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the tensor's bytes, in the order of its logical indices."""
    return zlib.crc32(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def check_replicas(model: nn.Module, transport: Transport) -> None:
    """RuntimeError, on every rank, that names the first parameter that differs and the ranks that differ from
    rank 0.

    Collective. Buffers are not compared: batch norm's statistics are each rank's own.
    """
    own = {name: checksum(parameter.detach()) for name, parameter in model.named_parameters()}
    every = all_gather_object(transport, own, name="replicas")
    for name in own:
        differing = [rank for rank, sums in enumerate(every) if sums.get(name) != every[0].get(name)]
        if differing:
            raise RuntimeError(f"replicas differ: parameter {name} of ranks {differing} is not rank 0's")
