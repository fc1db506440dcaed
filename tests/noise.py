"""Simulated ranks with a network that changes a message."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dgc.comm.lockstep import LockstepTransport, LockstepWork, LockstepWorld
from dgc.comm.requests import AllGather, AllToAll, Exchange, Request


class Noisy(LockstepWorld):
    """Changes the `number`-th message of rank 1. `messages`: their sizes in bytes."""

    def __init__(self, size: int, local_size: int | None = None, change: Any = Tensor.clone, number: int = -1):
        super().__init__(size, local_size)
        self.change, self.number, self.messages = change, number, list[int]()
        self.transports[1] = NoisyTransport(self, 1)

    def through_noise(self, request: Request) -> Request:
        match request:
            case AllGather(tensor):
                return replace(request, tensor=self._one(tensor))
            case AllToAll(tensor, splits, group) if group != "local":
                return replace(request, tensor=torch.cat([self._one(part) for part in tensor.split(list(splits))]))
            case Exchange(sends):
                return replace(request, sends={to: self._one(message) for to, message in sends.items()})
        return request

    def _one(self, message: Tensor) -> Tensor:
        self.messages.append(message.numel() * message.element_size())
        return self.change(message) if len(self.messages) - 1 == self.number else message


class NoisyTransport(LockstepTransport):
    """The end of the rank whose messages change."""

    _world: Noisy

    def launch(self, name: str, requests: Sequence[Request], communicator: str = "") -> LockstepWork:
        return super().launch(name, tuple(map(self._world.through_noise, requests)), communicator)


def flip(byte: int) -> Callable[[Tensor], Tensor]:
    def change(message: Tensor) -> Tensor:
        changed = message.clone()
        changed.view(-1).view(torch.uint8)[byte] ^= 1 << byte % 8
        return changed

    return change


def places(nbytes: int) -> list[int]:
    """In each word of the header (size, tensor, checksum, scale, ratio, format), the body, and the padding."""
    return [byte for byte in {0, 5, 8, 14, 19, 20, 24, 24 + (nbytes - 24) // 2, nbytes - 1} if byte < nbytes]
