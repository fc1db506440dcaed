"""The order in which the buckets of a step start: one for all ranks, close to the order in which they fill."""

from collections.abc import Iterator, Sequence

from dgc.comm.collectives import broadcast_object
from dgc.comm.transport import Transport


class StartOrder:
    """Says which buckets may start: those that are full, if all buckets before them have started.

    The order is that of the buckets in the first step, and then that in which rank 0 filled them.

    Args:
        sizes: Number of gradients of each bucket.
        transport: Connects the ranks.
        name: Prefix of control messages, unique on the transport.
    """

    def __init__(self, sizes: Sequence[int], transport: Transport, name: str):
        self.buckets = list(range(len(sizes)))  # in the order in which they start
        self._sizes, self._transport, self._name = sizes, transport, name
        self._is_learned = False
        self.reset()

    def reset(self) -> None:
        """Begin a step: no bucket has gradients or has started."""
        self._missing = list(self._sizes)
        self._filled: list[int] = []
        self._started = 0

    @property
    def has_started(self) -> bool:
        """Whether a bucket of this step has started."""
        return self._started > 0

    def add(self, bucket: int) -> None:
        """Count one more complete gradient of a bucket."""
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            self._filled.append(bucket)

    def start(self, only_full: bool = True) -> Iterator[int]:
        """Yield the buckets to start now, in order. With only_full=False these are all that have not started."""
        while self._started < len(self.buckets):
            bucket = self.buckets[self._started]
            if only_full and self._missing[bucket]:
                return
            yield bucket
            self._started += 1  # unless the caller has failed to start it

    def learn(self) -> None:
        """Take over the order in which rank 0 filled its buckets, if that has not been done. Collective."""
        if not self._is_learned:
            filled = broadcast_object(self._transport, self._filled, name=f"{self._name}.order")
            self.buckets = list(dict.fromkeys([*filled, *self.buckets]))
            self._is_learned = bool(filled)
