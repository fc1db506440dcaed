"""Operations on sparse vectors of a few elements. None waits for the device."""

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from dgc.kernels import Budget, SelectionKernels, SparseVector

BEYOND = 2**31 - 1  # larger than any index


def vector(indices: Int64[Tensor, "count"], values: Float32[Tensor, "count"]) -> SparseVector:
    """A sparse vector without room for more elements."""
    count = torch.full((), indices.numel(), dtype=torch.int32, device=indices.device)
    return SparseVector(indices.to(torch.int32), values, count)


def live(x: SparseVector) -> Bool[Tensor, "capacity"]:
    """A mask of the valid entries."""
    return torch.arange(x.indices.numel(), dtype=torch.int64, device=x.indices.device) < x.count


def largest_of(kernel: SelectionKernels, x: SparseVector, k: int) -> SparseVector:
    """The k elements of largest magnitude, of equal ones the first. Zeros are left out."""
    # never fewer elements than slots
    values = torch.nn.functional.pad(torch.where(live(x), x.values, 0.0), (0, k))
    ends = torch.tensor([0, values.numel()], dtype=torch.int64, device=values.device)
    budget = Budget(ends, torch.full((1,), k, dtype=torch.int64, device=values.device), k)
    chosen = kernel.select(values, budget).elements
    indices = torch.nn.functional.pad(x.indices, (0, k))[chosen.indices.long()]
    return SparseVector(torch.where(live(chosen), indices, 0), chosen.values, chosen.count)


def shared(x: SparseVector, other: SparseVector) -> SparseVector:
    """The elements of x at indices that `other` has too. Indices ascend in both."""
    wanted = torch.nn.functional.pad(torch.where(live(other), other.indices, BEYOND), (0, 1), value=BEYOND)
    found = live(x) & (wanted[torch.searchsorted(wanted, x.indices)] == x.indices)
    indices, order = torch.where(found, x.indices, BEYOND).sort()
    indices = torch.where(indices < BEYOND, indices, 0)
    return SparseVector(indices, x.values[order], found.sum(dtype=torch.int32))


def subtract(kernel: SelectionKernels, x: SparseVector, part: SparseVector) -> SparseVector:
    """x - part, at the indices of x. Those of `part` must be among them."""
    at = torch.searchsorted(torch.where(live(x), x.indices, BEYOND), part.indices).to(torch.int32)
    rest = x.values.clone()
    kernel.remove_sent_(SparseVector(at, part.values, part.count), None, rest)
    return SparseVector(x.indices, rest, x.count)
