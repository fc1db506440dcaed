"""The time of a step in which exchanges overlap with backward, simulated with one network and one processor.

A bucket's gradients are complete at some point of backward. Its exchange then alternates between computing
(encode, combine, decode) and messages. Of both resources one bucket at a time has each:

    processor    work of an exchange comes first, in the order in which it became possible; backward continues in
                 the time between
    network      messages in the order in which they were handed over

The step ends when backward and all exchanges have ended.

Differences from the exchange in dgc/optim/exchange: There, replies are used when the next hook of backward runs,
and messages after the third round of a conversation wait for the end of backward. On a GPU, encoding may overlap
with backward. The network needs no processor here; MPI and Gloo use one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True)
class BucketWork:
    """The exchange of one bucket.

    Attributes:
        ready: Share of backward, 0 to 1, after which the gradients are complete.
        computing: Seconds before the first message, between messages, and after the last one.
        messages: Seconds of each message on the network, one less than `computing`.
    """

    ready: float
    computing: tuple[float, ...]
    messages: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.computing) != len(self.messages) + 1:
            raise ValueError(
                f"BucketWork: {len(self.messages)} messages need {len(self.messages) + 1} times of computing "
                f"around them, not {len(self.computing)}"
            )
        if not 0 <= self.ready <= 1:
            raise ValueError(f"BucketWork: ready must be a share of backward from 0 to 1, not {self.ready}")


def overlapped(backward: float, buckets: Sequence[BucketWork]) -> float:
    """Seconds from the start of backward until it and the exchange of all buckets have ended.

    Args:
        backward: Seconds of backward alone.
        buckets: The exchanges. Of those that are ready at the same time, the first one starts first.
    """
    waiting = sorted(range(len(buckets)), key=lambda b: buckets[b].ready)  # for their gradients
    possible: list[tuple[float, int, int]] = []  # (time, bucket, number) of computing that can begin then
    clock = progress = network_free = 0.0
    while waiting or possible or progress < backward:
        if possible and possible[0][0] <= clock:
            _, b, number = heappop(possible)
            clock += buckets[b].computing[number]
            if number < len(buckets[b].messages):
                network_free = max(clock, network_free) + buckets[b].messages[number]
                heappush(possible, (network_free, b, number + 1))
            continue
        if waiting and buckets[waiting[0]].ready * backward <= progress:
            heappush(possible, (clock, waiting.pop(0), 0))
            continue
        target = buckets[waiting[0]].ready * backward if waiting else backward
        reply = possible[0][0] if possible else float("inf")
        if progress >= target:  # backward has ended
            clock = reply
        elif clock + (target - progress) <= reply:
            clock, progress = clock + (target - progress), target
        else:
            clock, progress = reply, progress + (reply - clock)
    return clock
