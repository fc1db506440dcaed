"""One machine from recordings of its ranks.

On two levels, each rank of a machine has a share of every bucket (dgc/engine/hierarchy.py). Shares hold
whole tensors, so one rank may have most of a bucket and another nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dgc.cost.model import Message, Traffic


def are_alike(traffic: Traffic) -> bool:
    """Whether all ranks of a machine send as this one: every message is a collective of all ranks."""
    messages = [message for bucket in traffic.buckets for message in bucket]
    return traffic.local_size == 1 or all(of.size == traffic.size and of.kind != "Exchange" for of in messages)


def machine_of(ranks: Sequence[Traffic]) -> Traffic:
    """The traffic of a machine whose ranks were recorded one by one, with the computing of the slowest.

    Messages to all ranks, or to those of the machine, are the same on all of its ranks, in number and order. Those
    in between go to the rank's own group on other machines. They share the network card, and ranks may differ in
    their number.

    Args:
        ranks: The same exchange, recorded as each rank of the machine.
    """
    decode = [traffic.decode for traffic in ranks]
    return replace(
        ranks[0],
        buckets=tuple(_joined(of) for of in zip(*(traffic.buckets for traffic in ranks), strict=True)),
        encode=max(traffic.encode for traffic in ranks),
        decode=None if None in decode else max(seconds or 0.0 for seconds in decode),
    )


def _joined(ranks: Sequence[tuple[Message, ...]]) -> tuple[Message, ...]:
    by_place = [_places(messages) for messages in ranks]
    places = sorted({place for of in by_place for place in of})
    return tuple(_together([of[place] for of in by_place if place in of]) for place in places)


def _places(messages: Sequence[Message]) -> dict[tuple[int, int], Message]:
    """By number of messages with the machine's other ranks so far, and of those without since the last one."""
    found, shared, own = {}, 0, 0
    for message in messages:
        shared, own = (shared, own + 1) if message.inner == 1 else (shared + 1, 0)
        found[shared, own] = message
    return found


def _together(messages: Sequence[Message]) -> Message:
    """What ranks of a machine send at the same time: the largest message, and the bytes of all on the card."""
    return replace(
        max(messages, key=lambda message: message.wire),
        awaited=max(message.awaited for message in messages),
        machine=sum(message.cross for message in messages),
    )


CACHE = Path("/sys/devices/system/cpu/cpu0/cache")


def cache_evictor() -> Callable[[], None]:
    """A function that replaces the content of this machine's caches, as a step of a large model does."""
    data = torch.zeros(2 * last_level_cache() // 4, dtype=torch.float32)

    def evict() -> None:
        data.add_(1.0)

    return evict


def last_level_cache(folder: Path = CACHE) -> int:
    """Bytes of the largest cache of a core, as Linux reports it; 64 MiB if it does not."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [file.read_text().strip() for file in folder.glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=2**26)
