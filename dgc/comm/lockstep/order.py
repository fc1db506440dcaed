"""The order in which the ranks launch the collectives of a lane."""

from dgc.comm.lockstep.rendezvous import LockstepError


class LaunchOrder:
    """Checks that all ranks launch the collectives of one lane in the same order.

    Args:
        lane: Name of the lane, for error messages.
    """

    def __init__(self, lane: str):
        self._lane = lane
        self._names: list[str] = []  # in the order of the first rank that launched each
        self._launched: dict[int, int] = {}  # number of launches by rank

    def open(self, rank: int) -> None:
        self._launched.setdefault(rank, 0)

    def is_open(self, rank: int) -> bool:
        return rank in self._launched

    def launch(self, rank: int, name: str) -> None:
        """Record a launch.

        Raises:
            LockstepError: Another rank has launched another collective in this place.
        """
        place = self._launched[rank]
        self._launched[rank] += 1
        if place == len(self._names):
            self._names.append(name)
        elif self._names[place] != name:
            raise LockstepError(
                f"rank {rank} launches {name} as number {place} of lane {self._lane!r}, where another rank has "
                f"launched {self._names[place]}: a transport that matches by order would mix up their tensors"
            )
