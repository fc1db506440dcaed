"""GPU kernels over selections, and the fused pass of weight decay.

Kernels are not specialised for sizes that change from step to step, because each variant would be compiled during
training.
"""

from typing import no_type_check

import triton
import triton.language as tl

# Larger than every index of a bucket: marks invalid entries.
NOWHERE = tl.constexpr(0x7FFFFFFF)


@triton.jit
@no_type_check
def find(bounds, n_segments, steps, i):
    """Return the segment s of each i, with bounds[s] <= i < bounds[s+1]. steps: bit length of n_segments."""
    low = tl.zeros_like(i)
    high = low + n_segments
    for _ in range(steps):
        middle = (low + high) // 2
        right = tl.load(bounds + middle) <= i
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit
@no_type_check
def rounded(x, P: tl.constexpr):
    """Return x rounded to P, to nearest even, in its own dtype."""
    if P == tl.bfloat16:
        # explicit: Triton's interpreter truncates, GPUs round
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        y = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        y = x.to(P).to(x.dtype)
    return y


@triton.jit
@no_type_check
def take(indices, values, count, u, v, MASK_U: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = i < tl.load(count)
    index = tl.load(indices + i, mask=held, other=0)
    x = tl.load(v + index, mask=held, other=0.0)
    tl.store(v + index, x - tl.load(values + i, mask=held, other=0.0), mask=held)
    if MASK_U:
        tl.store(u + index, tl.zeros_like(x), mask=held)


@triton.jit(do_not_specialize=["total", "n_parts", "steps"])
@no_type_check
def hide_tails(keys, total, starts, counts, n_parts, steps, BLOCK: tl.constexpr):
    """Set entries of each part beyond its count to NOWHERE."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part = find(starts, n_parts, steps, i)
    tail = (i < total) & (i - tl.load(starts + part) >= tl.load(counts + part))
    tl.store(keys + i, tl.full([BLOCK], NOWHERE, tl.int32), mask=tail)


@triton.jit(do_not_specialize=["total"])
@no_type_check
def mark_heads(keys, heads, total, BLOCK: tl.constexpr):
    """Set heads[i] = 1 where a run of equal keys begins."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + i, mask=i < total, other=NOWHERE)
    before = tl.load(keys + i - 1, mask=(i > 0) & (i < total), other=-1)
    tl.store(heads + i, ((key != before) & (key != NOWHERE)).to(tl.int32), mask=i < total)


@triton.jit(do_not_specialize=["total", "n_parts", "size"])
@no_type_check
def sum_runs(keys, order, values, places, total, n_parts, size, indices, means, BLOCK: tl.constexpr):
    """Average the values of each run. A run has at most one value of each part, in the order of the parts."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + i, mask=i < total, other=NOWHERE)
    before = tl.load(keys + i - 1, mask=(i > 0) & (i < total), other=-1)
    head = (key != before) & (key != NOWHERE)
    mean = tl.zeros([BLOCK], dtype=tl.float32)
    for ahead in range(n_parts):
        j = i + ahead
        same = head & (j < total) & (tl.load(keys + j, mask=head & (j < total), other=NOWHERE) == key)
        x = tl.load(values + tl.load(order + j, mask=same, other=0), mask=same, other=0.0)
        mean = tl.where(same, mean + x, mean)
    place = tl.load(places + i, mask=head, other=1) - 1
    tl.store(indices + place, key.to(tl.int64), mask=head)
    # `/` would be an approximate division on GPUs
    tl.store(means + place, tl.math.div_rn(mean, tl.zeros_like(mean) + size), mask=head)


@triton.jit(do_not_specialize=["n_segments", "steps", "k"])
@no_type_check
def subtract_at(
    targets, bounds, factors, n_segments, steps, indices, values, k,
    P: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Subtract where the target's pointer is not 0. There is one launch per dtype."""
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(indices + j, mask=j < k, other=0)
    s = find(bounds, n_segments, steps, i)
    address = tl.load(targets + s)
    ours = (j < k) & (address != 0)
    target = address.to(tl.pointer_type(P)) + (i - tl.load(bounds + s))
    change = tl.load(values + j, mask=ours, other=0.0) * tl.load(factors + s)
    p = tl.load(target, mask=ours, other=0.0).to(WIDE)
    tl.store(target, rounded(p - rounded(change, P).to(WIDE), P).to(P), mask=ours)


@triton.jit
@no_type_check
def decay(
    p, buffer, n, settings, NESTEROV: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Apply weight decay. settings: weight decay, momentum, learning rate. Each operation is rounded to P."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    weight_decay = tl.load(settings).to(WIDE)
    momentum = tl.load(settings + 1).to(WIDE)
    lr = tl.load(settings + 2).to(WIDE)
    x = tl.load(p + i, mask=i < n, other=0.0).to(WIDE)
    d = rounded(x * weight_decay, P)
    b = tl.load(buffer + i, mask=i < n, other=0.0).to(WIDE)
    b = rounded(rounded(b * momentum, P) + d, P)
    tl.store(buffer + i, b.to(P), mask=i < n)
    step = b
    if NESTEROV:
        step = rounded(d + rounded(b * momentum, P), P)
    tl.store(p + i, rounded(x - rounded(step * lr, P), P).to(P), mask=i < n)
