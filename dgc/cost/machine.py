"""One machine from recordings of its ranks.

On two levels, each rank of a machine has a share of every bucket (dgc/compression/hierarchical.py). Shares hold
whole tensors, so one rank may have most of a bucket and another nothing.
"""

from collections.abc import Sequence
from dataclasses import replace

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
