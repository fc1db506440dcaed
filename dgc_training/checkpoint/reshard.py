"""Redistributes the error state to another number of ranks, so that its mean over the ranks is unchanged.

Divide [0, 1) into one interval of length 1/old per old rank, and into one of length 1/new per new rank. New rank r
takes from old rank o the share w[r, o] = new * (length of their overlap):

    4 -> 1:  mean of all          1 -> 4:  each takes a full copy
    3 -> 2:  2/3 e0 + 1/3 e1,  1/3 e1 + 2/3 e2

Columns sum to new/old, so the mean over the new ranks equals the mean over the old ranks. Rows sum to 1, so no
rank begins with a larger error state than ranks had before, as it would if some states were scaled up. All updates
of error and momentum are linear, so the mean evolves as it would have on the old ranks. A new rank combines at
most ceil(old/new) + 1 old ranks, so a sparse error state stays about as sparse.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, cast

import torch
from torch import Tensor


def shares(old_size: int, new_size: int, rank: int) -> dict[int, Fraction]:
    """Weight of each old rank in the state of new rank `rank`. Old ranks with weight 0 are left out."""
    weights = {}
    for old in range(old_size):
        begin = max(Fraction(rank, new_size), Fraction(old, old_size))
        end = min(Fraction(rank + 1, new_size), Fraction(old + 1, old_size))
        if end > begin:
            weights[old] = new_size * (end - begin)
    return weights


def blend(states: Mapping[int, Any], weights: Mapping[int, Fraction], where: str = "state") -> Any:
    """Weighted sum of nested states, as returned by `compression_state_dict`.

    Floating-point tensors are summed in float64 and rounded once. Values that are equal on all ranks (counters,
    shared factors) are kept.

    Args:
        states: state by old rank.
        weights: weight by old rank.
        where: prefix of the key in error messages.

    Raises:
        ValueError: with the key, if values differ and cannot be summed.
    """
    parts = [states[rank] for rank in weights]
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise ValueError(f"{where} has different types on the ranks that saved it")
    if isinstance(first, dict):
        if any(part.keys() != first.keys() for part in parts):
            raise ValueError(f"{where} has different keys on the ranks that saved it")
        return {
            key: blend({rank: states[rank][key] for rank in weights}, weights, f"{where}.{key}")
            for key in first
        }
    if isinstance(first, list | tuple):
        if any(len(part) != len(first) for part in parts):
            raise ValueError(f"{where} has different lengths on the ranks that saved it")
        return type(first)(
            blend({rank: states[rank][i] for rank in weights}, weights, f"{where}.{i}")
            for i in range(len(first))
        )
    if isinstance(first, Tensor):
        return _blend_tensors(parts, [float(weight) for weight in weights.values()], where)
    if any(part != first for part in parts):
        raise ValueError(f"{where} differs between the ranks that saved it and is not a tensor: {parts}")
    return first


def _blend_tensors(parts: list[Tensor], weights: list[float], where: str) -> Tensor:
    first = parts[0]
    if any(part.shape != first.shape or part.dtype != first.dtype for part in parts):
        raise ValueError(f"{where} has different shapes or types on the ranks that saved it")
    if all(torch.equal(part, first) for part in parts):
        return first.clone()
    if not first.is_floating_point():
        raise ValueError(f"{where} differs between the ranks that saved it and is not a floating-point tensor")
    total = sum(weight * part.double() for weight, part in zip(weights, parts, strict=True))
    return cast(Tensor, total).to(first.dtype)
