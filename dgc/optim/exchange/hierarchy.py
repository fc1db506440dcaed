"""One level or two: all ranks alike, or dense inside a machine and compressed between machines."""

import warnings
from collections.abc import Sequence

from dgc.comm.collectives import MachineRank, find_machine_rank
from dgc.comm.transport import Transport
from dgc.compression.hierarchical import HierarchicalCompressor
from dgc.compression.protocol import Compressor, StatelessCompressor
from dgc.optim.compression_state import ErrorStatePart
from dgc.optim.exchange.planning import PlannedBucket

MODES = {True: "on", False: "off"}


def choose_place(
    transport: Transport, hierarchical: str | bool, compressors: Sequence[Compressor]
) -> MachineRank | None:
    """Return this rank's place among the machines, or None if all ranks are treated alike. Collective.

    With "auto" and only stateless compressors, which reduce in one step, the result is None: the all-reduce of MPI
    and NCCL takes the machines into account already.

    Args:
        transport: Connects the ranks.
        hierarchical: "on", "off", "auto", or a bool. The same on every rank.
        compressors: The compressors of the optimizer.

    Raises:
        ValueError: `hierarchical` is none of these; or it is "on", and the transport has no groups, or machines
            have different numbers of ranks.
    """
    mode = MODES[hierarchical] if isinstance(hierarchical, bool) else hierarchical
    if mode not in ("auto", "on", "off"):
        raise ValueError(f"hierarchical must be 'auto', 'on' or 'off', not {hierarchical!r}")
    stateless = all(isinstance(compressor, StatelessCompressor) for compressor in compressors)
    if mode == "off" or (mode == "auto" and (stateless or not _has_groups(transport))):
        return None
    try:
        place = find_machine_rank(transport, "hierarchical='on'")
    except ValueError as error:
        if mode == "on":
            raise
        if transport.rank == 0:
            warnings.warn(f"{error}: hierarchical='auto' treats all ranks alike", stacklevel=3)
        return None
    is_useful = place.machines > 1 and place.local_size > 1
    return place if is_useful or mode == "on" else None


def _has_groups(transport: Transport) -> bool:
    try:
        transport.group_size("local")
    except ValueError:
        return False
    return True


def plan_compressors(
    planned: Sequence[PlannedBucket], transport: Transport, hierarchical: str | bool
) -> tuple[MachineRank | None, ErrorStatePart | None]:
    """Let the compressors plan their buckets, for all ranks or for the machines. Collective.

    Args:
        planned: The buckets. On two levels their compressors are replaced.
        transport: Connects the ranks.
        hierarchical: As in `choose_place`.

    Returns:
        This rank's place among the machines, and the part of its machine's error state that it has. None if all
        ranks are treated alike.
    """
    place = choose_place(transport, hierarchical, [plan.compressor for plan in planned])
    two_levels: dict[int, HierarchicalCompressor] = {}
    if place is not None:
        loads = [0] * place.local_size
        for plan in planned:
            inner = plan.compressor
            plan.compressor = two_levels.setdefault(id(inner), HierarchicalCompressor(inner, place, loads))
    for plan in planned:
        plan.compressor.plan(plan.bucket, transport.size, transport.rank)
    if place is None:
        return None, None
    tensors = {name for compressor in two_levels.values() for name in compressor.tensors()}
    others = {s.name for plan in planned for s in plan.bucket.segments} - tensors
    return place, ErrorStatePart(
        machine=place.machine, machines=place.machines, tensors=sorted(tensors), others=sorted(others)
    )
