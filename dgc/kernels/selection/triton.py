"""The GPU tier: Triton kernels with the same results and bits as `reference`.

Each operation takes a fixed number of launches per bucket, independent of the number of tensors: accumulate_ 1,
select 9, accumulate_and_select_ 10, moments 2, tail 2, remove_sent_ 1, merge_mean 3, subtract_at_ 1 per dtype of
the targets, decay_ 1, and 1 more for a pass that removes sent elements. Torch adds a few of its own (zeros; in
merge_mean a stable sort and a cumulative sum). Nothing waits for the device.

The bits are equal because kernels are compiled without contraction to FMA, which would skip the rounding of a
product, floats are never added atomically, and division is correctly rounded. Without a GPU the kernels run in
Triton's interpreter if TRITON_INTERPRET=1 is set before Triton is first imported.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.kernels.selection import triton_passes as passes
from dgc.kernels.selection import triton_sparse as sparse
from dgc.kernels.selection import triton_statistics as statistics
from dgc.kernels.selection.protocol import Budget, Merged, Moments, PassInputs, SparseVector, Tail, TopKResult
from dgc.kernels.selection.reference import predicted_lower_bounds
from dgc.kernels.selection.triton_select import Candidates, choose, room_for_candidates
from dgc.kernels.triton_tables import BLOCK, Launcher, Tiling, Tilings, blocks, on_device, pointers

if not hasattr(triton, "knobs"):
    raise ImportError(f"Triton {triton.__version__} is too old: these kernels need Triton 3.4 or later")

INTERPRETED = triton.knobs.runtime.interpret
FLOATS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


class Triton:
    """Implements `SelectionKernels` of `protocol`. `launches` counts launched kernels, without torch's own.

    Args:
        tile: Elements per program in passes over a bucket, a power of two.
        slots: Least number of candidates that a tile can hold, a power of two.

    Raises:
        ValueError: There is no GPU, and Triton's interpreter is off.
    """

    name = "triton"

    def __init__(self, tile: int = 2048, slots: int = 256):
        if not (INTERPRETED or torch.cuda.is_available()):
            raise ValueError("the triton kernels need a GPU, or TRITON_INTERPRET=1 set before Triton is imported")
        self.tile, self.slots = tile, slots
        self._launch = Launcher(INTERPRETED)
        self._tilings = Tilings(tile)

    def __str__(self) -> str:
        return f"{self.name} (interpreted)" if INTERPRETED else self.name

    @property
    def launches(self) -> int:
        return self._launch.launches

    def accumulate_(self, inputs: PassInputs) -> Int64[Tensor, ""]:
        whole = on_device((0, inputs.v.numel()), torch.int64, inputs.v.device)
        return self._accumulate(inputs, self._tilings.of(whole, _lengths(inputs)), None)

    def predicted_lower_bounds(
        self, last: Float32[Tensor, "S"], before: Float32[Tensor, "S"], margin: float
    ) -> Float32[Tensor, "S"]:
        return predicted_lower_bounds(last, before, margin)

    def accumulate_and_select_(
        self, inputs: PassInputs, budget: Budget, lower_bounds: Float32[Tensor, "S"] | None
    ) -> TopKResult:
        tiling = self._tilings.of(budget.bounds, _lengths(inputs))
        candidates = room_for_candidates(tiling, inputs.v.numel(), budget, lower_bounds, self.tile, self.slots)
        first = self._accumulate(inputs, tiling, candidates)
        return choose(self._launch, inputs.v, tiling, budget, candidates, first, self.tile)

    def select(
        self, v: Float32[Tensor, "n"], budget: Budget, lower_bounds: Float32[Tensor, "S"] | None = None
    ) -> TopKResult:
        # Lower bounds never change the result and are ignored: collecting candidates would read v once more, which
        # only pays in a pass that reads it anyway.
        first = torch.full((), v.numel(), dtype=torch.int64, device=v.device)
        tiling = self._tilings.of(budget.bounds, (v.numel(),))
        return choose(self._launch, v, tiling, budget, None, first, self.tile)

    def radix_select(self, v: Float32[Tensor, "n"], budget: Budget) -> SparseVector:
        return self.select(v, budget).elements  # by digits already (`triton_digits`)

    def moments(self, v: Float32[Tensor, "n"], bounds: Int64[Tensor, "bounds"]) -> Moments:
        return statistics.moments(self._launch, v, self._tilings.of(bounds, (v.numel(),)), self.tile)

    def tail(
        self, v: Float32[Tensor, "n"], bounds: Int64[Tensor, "bounds"], lower_bounds: Float32[Tensor, "S"]
    ) -> Tail:
        return statistics.tail(self._launch, v, self._tilings.of(bounds, (v.numel(),)), lower_bounds, self.tile)

    def remove_sent_(self, sent: SparseVector, u: Float32[Tensor, "n"] | None, v: Float32[Tensor, "n"]) -> None:
        entries = (sent.indices, sent.values, sent.count)
        self._launch(sparse.take, v, blocks(sent.values.numel()), *entries, u, v, u is not None, BLOCK)

    def merge_mean(self, parts: Sequence[SparseVector], size: int, numel: int) -> Merged:
        keys, values = torch.cat([p.indices for p in parts]), torch.cat([p.values for p in parts])
        total, device = keys.numel(), keys.device
        indices = torch.empty(total, dtype=torch.int64, device=device)
        means = torch.zeros(total, dtype=torch.float32, device=device)
        if total == 0:
            return Merged(indices, means, torch.zeros((), dtype=torch.int32, device=device))
        starts = on_device((0, *accumulate(p.indices.numel() for p in parts)), torch.int64, device)
        counts = torch.stack([p.count for p in parts])
        ends = (starts, counts, len(parts), len(parts).bit_length())
        self._launch(sparse.hide_tails, keys, blocks(total), keys, total, *ends, BLOCK)
        # stable: equal keys stay in the order of the parts
        keys, order = torch.sort(keys, stable=True)
        heads = torch.empty_like(keys)
        self._launch(sparse.mark_heads, keys, blocks(total), keys, heads, total, BLOCK)
        places = heads.cumsum(0, dtype=torch.int32)
        runs = (keys, order, values, places, total, len(parts), float(size))
        self._launch(sparse.sum_runs, keys, blocks(total), *runs, indices, means, BLOCK)
        return Merged(indices, means, places[-1])

    def subtract_at_(
        self,
        targets: Sequence[Tensor],
        bounds: Int64[Tensor, "bounds"],
        indices: Int64[Tensor, "k"],
        values: Float32[Tensor, "k"],
        factors: Sequence[float],
    ) -> None:
        scale = on_device(tuple(factors), torch.float32, values.device)
        k, segments = indices.numel(), len(targets)
        for dtype in dict.fromkeys(t.dtype for t in targets):
            own = pointers([t if t.dtype == dtype else None for t in targets], dtype, values.device)
            sought = (own, bounds, scale, segments, segments.bit_length(), indices, values, k)
            self._launch(sparse.subtract_at, values, blocks(k), *sought, FLOATS[dtype], _wide(dtype), BLOCK)

    def decay_(
        self,
        p: Tensor,
        buffer: Tensor,
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
    ) -> None:
        settings = on_device((weight_decay, momentum, lr), torch.float64, p.device)
        n = p.numel()
        types = (FLOATS[p.dtype], _wide(p.dtype))
        self._launch(sparse.decay, p, blocks(n), p, buffer, n, settings, nesterov, *types, BLOCK)

    def _accumulate(self, inputs: PassInputs, tiling: Tiling, candidates: Candidates | None) -> Int64[Tensor, ""]:
        if inputs.sent is not None:
            self.remove_sent_(inputs.sent, inputs.u if inputs.masking else None, inputs.v)
        first = torch.full((), inputs.v.numel(), dtype=torch.int64, device=inputs.v.device)
        form = 0 if inputs.u is None else 2 if inputs.nesterov else 1
        sources = pointers(inputs.g, inputs.g[0].dtype, inputs.v.device)
        work = (tiling.table, tiling.count, sources, inputs.u, inputs.v, float(inputs.momentum), first)
        stock: tuple[object, ...] = (None, None, 1, None, None, None, self.tile, 1)
        if candidates is not None:
            counts = (candidates.lower_bounds, candidates.counts, candidates.lower_bounds.numel())
            slots = (candidates.held, candidates.values, candidates.lanes, self.tile, candidates.slots)
            stock = (*counts, *slots)
        variant = (FLOATS[inputs.g[0].dtype], form, candidates is not None)
        self._launch(passes.accumulate, inputs.v, tiling.count, *work, *stock, *variant)
        return first


def _lengths(inputs: PassInputs) -> tuple[int, ...]:
    return tuple(g.numel() for g in inputs.g)


def _wide(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32
