"""The states of all ranks in one object, for scripts that save on rank 0 only.

The states pass one after another, on the CPU. Beside its own state a rank holds one of another rank, as bytes and
as tensors, and rank 0 holds all of them. Every state is sent to all ranks: N states of b bytes take about N b
bytes of each link.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dgc.comm.collectives import all_gather_object, broadcast_object
from dgc.comm.meeting import meet
from dgc.core.state import with_tensors
from dgc.engine.redistribute import redistribute
from dgc.engine.state import HasCompression

RANKS = "ranks"
GATHER = "Call it on all ranks, outside of `if rank == 0`, and save what it returns on rank 0"
LOAD = "Call it on all ranks, outside of `if rank == 0`: only rank 0 needs the file, the others may pass None"


class HasGatheredState(HasCompression):
    """Adds that rank 0 can save the states of all ranks, and load them."""

    def gather_state(self) -> dict[str, Any] | None:
        """Return on rank 0 the `compression_state_dict()` of all ranks, and None on the others. Collective.

        Raises:
            RuntimeError: Some ranks have not called it within the seconds of `connect(timeout=)`, or 60 if none
                were given. Ranks that wait for rank 0 wait for half an hour.

        Example:
            >>> model = DistributedDataParallel(model)
            >>> exchange = compress(model, TwoPhaseCompressor(bits=8))
            >>> sorted(exchange.gather_state())  # on every rank; rank 0 saves it
            ['ranks']
        """
        own, ranks, states = with_tensors(Tensor.cpu, self.compression_state_dict()), self._ranks, []
        meet(ranks, "gather_state()", GATHER)
        for rank in range(ranks.size):
            state = broadcast_object(ranks, own, rank, f"state.gather{rank}")
            if ranks.rank == 0:
                states.append(state)
        return {RANKS: states} if ranks.rank == 0 else None

    def load_gathered(self, gathered: Mapping[str, Any] | None) -> None:
        """Load this rank's part of what `gather_state` returned on rank 0. Collective.

        Of another number of ranks, the states are redistributed: their mean is unchanged.

        Args:
            gathered: On rank 0, what `gather_state` returned there. Other ranks may pass None.

        Raises:
            ValueError: On every rank, if rank 0 has no such state, or as `load_compression_state_dict` and
                `redistribute` do.
            RuntimeError: Some ranks have not called it, as in `gather_state`.
        """
        ranks, states, problem = self._ranks, list[dict[str, Any]](), ""
        meet(ranks, "load_gathered()", LOAD)
        parts = all_gather_object(ranks, self.part, "state.parts")
        if ranks.rank == 0:
            try:
                states = states_for(gathered, ranks.size, parts)
            except ValueError as error:
                problem = str(error)
        if problem := broadcast_object(ranks, problem, name="state.problem"):
            raise ValueError(problem)
        for rank in range(ranks.size):
            state = broadcast_object(ranks, states[rank] if states else None, name=f"state.scatter{rank}")
            if rank == ranks.rank:
                own = state
        self.load_compression_state_dict(own)


def states_for(gathered: Any, size: int, parts: Any) -> list[dict[str, Any]]:
    """The state of each of `size` ranks, whose parts of residuals are `parts`."""
    states = gathered.get(RANKS) if isinstance(gathered, Mapping) else None
    if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
        raise ValueError(
            "load_gathered needs on rank 0 what gather_state() returned there, the states of all ranks"
        )
    return states if len(states) == size else redistribute(states, size, parts)
