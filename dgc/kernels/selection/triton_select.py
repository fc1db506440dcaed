"""Host side of the exact selection: it allocates memory and launches the kernels of `triton_digits`."""

from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int32, Int64
from torch import Tensor

from dgc.kernels.selection import triton_digits as digits
from dgc.kernels.selection.protocol import Budget, SparseVector, TopKResult
from dgc.kernels.triton_tables import Launcher, Tiling

BINS = int(digits.BINS.value)
# (shift, bits) of each digit, the most significant first
DIGITS = ((20, 11), (10, 10), (0, 10))
SUMS = 4096
# If more than one in this many elements is selected, candidates cost more traffic than they save.
SPARSE = 8


@dataclass(frozen=True, eq=False)
class Candidates:
    """Elements at or above their lower bound, in slots of their tile. counts: candidates, then non-zeros."""

    lower_bounds: Float32[Tensor, "S"]
    slots: int
    counts: Int64[Tensor, "2 S"]
    held: Int32[Tensor, "tiles"]
    values: Float32[Tensor, "room"]
    lanes: Int32[Tensor, "room"]


def room_for_candidates(
    tiling: Tiling, n: int, budget: Budget, lower_bounds: Float32[Tensor, "S"] | None, tile: int, least: int
) -> Candidates | None:
    """Return empty slots for eight times the selected elements, at least `least` per tile; None if not useful."""
    if lower_bounds is None or budget.capacity * SPARSE > n:
        return None
    device = lower_bounds.device
    slots = min(max(1 << (8 * budget.capacity * tile // max(n, 1)).bit_length(), least), max(tile // 4, least))
    return Candidates(
        lower_bounds=lower_bounds,
        slots=slots,
        counts=torch.zeros(2, lower_bounds.numel(), dtype=torch.int64, device=device),
        held=torch.empty(tiling.count, dtype=torch.int32, device=device),
        values=torch.empty(tiling.count * slots, dtype=torch.float32, device=device),
        lanes=torch.empty(tiling.count * slots, dtype=torch.int32, device=device),
    )


def choose(
    launch: Launcher,
    v: Float32[Tensor, "n"],
    tiling: Tiling,
    budget: Budget,
    candidates: Candidates | None,
    first_nonfinite: Int64[Tensor, ""],
    tile: int,
) -> TopKResult:
    """Select from v in nine launches."""
    device, ks, segments, capacity = v.device, budget.ks, budget.ks.numel(), budget.capacity
    histograms = torch.zeros(segments * BINS, dtype=torch.int32, device=device)
    prefixes, wanted, chosen = torch.empty(3, segments, dtype=torch.int32, device=device)
    thresholds = torch.empty(segments, dtype=torch.float32, device=device)
    tallies = torch.empty(tiling.count + 1, dtype=torch.int64, device=device)
    # one tensor of zeros for all results; the values are aligned for wide accesses
    begin = -(-capacity // 4) * 4
    results = torch.zeros(begin + capacity + 2, dtype=torch.int32, device=device)
    indices, values = results[:capacity], results[begin : begin + capacity].view(torch.float32)
    missed, count = results[-2], results[-1]

    counts, held, slot_values, slot_lanes, slots = None, None, None, None, 1
    if candidates is not None:
        counts, held, slots = candidates.counts, candidates.held, candidates.slots
        slot_values, slot_lanes = candidates.values, candidates.lanes
    floored = candidates is not None
    where = (tiling.table, tiling.count)
    state: tuple[object, ...]
    stock = (ks, counts, segments)
    for shift, bits in DIGITS:
        state = (held, slot_values, histograms, prefixes)
        launch(digits.count_digits, v, tiling.count, *where, v, *stock, *state, tile, slots, floored, shift, bits)
        state = (missed, prefixes, wanted, chosen, thresholds)
        launch(digits.pick_digits, v, segments, histograms, *stock, *state, floored, shift, bits)
    state = (held, slot_values, prefixes, tallies)
    launch(digits.tally, v, tiling.count, *where, v, *stock, *state, tile, slots, floored)
    launch(digits.offsets, v, 1, tallies, tiling.count, chosen, segments, count, SUMS)
    state = (held, slot_values, slot_lanes, prefixes, wanted, tallies, chosen, indices, values)
    launch(digits.write, v, tiling.count, *where, tiling.first, v, *stock, *state, tile, slots, floored)
    return TopKResult(SparseVector(indices, values, count), thresholds, first_nonfinite, missed)
