"""Every operation of quantizers, for comparison with the reference."""

from typing import Any

import torch
from kernels.comparison import random, same

from dgc.kernels.codes import Quantizers, layout_of

REFERENCE = Quantizers()
UNIFORM = [(2, 1, None), (2, 1, 0), (4, 5, None), (4, 7, 2), (8, 127, None), (8, 127, 2**32 - 3)]


def operations(q: Any, bounds: Any, each: Any) -> Any:
    """(encode(v, keep), add_(codes, total)) of every kind."""
    cuts, thirds = each - each.nan_to_num(posinf=9.0).mean(), each / 3
    yield lambda v, *k: q.sign_encode(v, bounds, cuts, thirds, *k), lambda c, t: q.sign_add_(c, bounds, thirds, t)
    yield lambda v, *k: q.tern_encode(v, bounds, each, *k), lambda c, t: q.tern_add_(c, bounds, each, t)
    scales = 3 * each
    for bits, levels, seed in UNIFORM:
        yield (
            lambda v, *k, s=(levels, bits, seed): q.uniform_encode(v, bounds, scales, *s, *k),
            lambda c, t, s=(levels, bits): q.uniform_add_(c, bounds, scales, *s, t),
        )


def coded(q: Any, v: Any, bounds: Any, each: Any) -> Any:
    """Of every operation the codes and residual, both without a residual, the sum with v, and with zeros."""
    results = []
    for encode, add_ in operations(q, bounds, each):
        codes, residual = encode(v)
        total, decoded = v.clone(), torch.zeros_like(v)
        add_(codes, total)
        add_(torch.cat([codes[:1], codes])[1:], decoded)  # at any address
        results.append((codes, residual, *encode(v, False), total, decoded))
    return results


def assert_same_codes(ours: Any, expected: Any, v: Any) -> None:
    for operation, (found, right) in enumerate(zip(ours, expected, strict=True)):
        codes, residual, alone, nothing, _, decoded = found
        assert all(map(same, found, right)), operation
        assert same(alone, codes) and not nothing.numel(), operation
        assert same(residual, v - decoded), operation


def means(q: Any, bounds: Any, values: Any, factors: Any, size: int) -> Any:
    """mean_(codes, mean) of every kind, in the order of `operations`, for the values of all ranks."""
    thirds, scales = [each / 3 for each in values], [3 * each for each in values]
    yield lambda codes, mean: q.sign_mean_(codes, bounds, thirds, factors, size, mean)
    yield lambda codes, mean: q.tern_mean_(codes, bounds, values, factors, size, mean)
    for bits, levels, _ in UNIFORM:
        yield lambda codes, mean, s=(levels, bits): q.uniform_mean_(codes, bounds, scales, *s, size, mean)


def check_sums(q: Any, bounds: Any, width: int, bits: int, ranks: int) -> None:
    """Each rank packs its share of the sums of all ranks' fields, of which all make the mean."""
    n, nbytes, device = int(bounds[-1]), layout_of(bounds, width, 4).nbytes, bounds.device
    share, generator = 4 * -(-nbytes // (4 * ranks)), torch.Generator().manual_seed(n)
    codes = torch.randint(256, (ranks, ranks * share), generator=generator).byte().to(device)
    fields, factors = share * 8 // width, random(len(bounds) - 1, 30).to(device)
    whole, packed = torch.tensor([0, fields], device=device), []
    for parts in zip(*(own.split(share) for own in codes), strict=True):
        packed.append(q.pack_sums(parts, whole, width, bits))
        assert same(packed[-1], REFERENCE.pack_sums(parts, whole, width, bits))
    mean, right = (torch.full((n,), torch.nan, device=device) for _ in range(2))
    q.sums_mean_(packed, fields, width, bits, bounds, factors, mean)
    received, ones = [own[:nbytes].contiguous() for own in codes], [torch.ones_like(factors)] * ranks
    if width == 2:
        REFERENCE.tern_mean_(received, bounds, ones, factors, ranks, right)
    else:
        REFERENCE.sign_mean_(received, bounds, ones, factors, ranks, right)
    assert same(mean, right)
