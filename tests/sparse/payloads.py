"""Selections, and every format, for the tests of payloads."""

from typing import Any

import torch

from dgc.kernels.payload import Codec
from dgc.kernels.selection import Budget, SparseVector
from dgc.sparse import payloads as formats
from dgc.sparse.payloads.payload import PayloadPlan

VALUES: dict[str, formats.ValueFormat] = {
    "fp32": formats.CastValues(),
    "fp16": formats.CastValues("fp16"),
    "bf16": formats.CastValues("bf16"),
    "int8": formats.Int8Values(),
    "sign": formats.SignValues(),
    "2 bits": formats.TwoBitValues(),
}
INDICES: dict[str, formats.IndexFormat] = {
    "int64": formats.PlainIndices(),
    "int32": formats.PlainIndices("int32"),
    "packed": formats.PackedIndices(),
    "rice": formats.RiceIndices(),
    "chunks": formats.ChunkIndices(),
}
FORMATS = {f"{v} {i}": formats.SparseFormat(VALUES[v], INDICES[i]) for v in VALUES for i in INDICES}
# Every value format and every index format at least once.
NAMES = ("fp32 int64", "fp16 int32", "bf16 packed", "int8 rice", "sign rice", "2 bits packed", "fp32 chunks")
SOME = {name: FORMATS[name] for name in NAMES}
# Those that kernels decode and add in one call: their values have a `kind`.
ALL_OF_KERNELS = {name: form for name, form in FORMATS.items() if form.values.kind is not None}
SOME_OF_KERNELS = {name: form for name, form in SOME.items() if form.values.kind is not None}
CODEC = Codec()


def formats_for(number: Any) -> Any:
    """Of a case of this number all formats of indices, with formats of values in turn; of the first all pairs."""
    if number == 0:
        return FORMATS
    values = list(VALUES)
    names = [f"{values[(number + i) % len(values)]} {indices}" for i, indices in enumerate(INDICES)]
    return {name: FORMATS[name] for name in names}


def selection_of(indices: Any, values: Any = None, capacity: Any = None, seed: int = 0) -> Any:
    """Ascending indices, and values (normal ones where none are given), filled up to the capacity."""
    count = len(indices)
    capacity = count if capacity is None else capacity
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) if values is None else values
    padded = torch.zeros(capacity, dtype=torch.int32)
    padded[:count] = torch.as_tensor(indices)
    slots = torch.zeros(capacity)
    slots[:count] = torch.as_tensor(values)
    return SparseVector(padded, slots, torch.tensor(count, dtype=torch.int32))


def budget_of(capacity: Any, *bounds: Any) -> Any:
    edges = torch.tensor(bounds)
    return Budget(edges, torch.zeros(edges.numel() - 1, dtype=torch.int64), capacity)


def scattered(numel: Any, count: Any, seed: int = 0) -> Any:
    return torch.randperm(numel, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def clustered(numel: Any, count: Any, seed: int = 0) -> Any:
    """Half of them in a hundredth of the bucket, the rest in runs."""
    dense = scattered(max(count // 2, numel // 100), count // 2, seed)
    runs = (scattered(numel // 8, count // 8 + 1, seed) * 8).unsqueeze(1) + torch.arange(5)
    both = torch.cat([dense, runs.view(-1)]).unique()
    return both[both < numel][:count]


def encode(
    form: Any, selection: Any, budget: Any, numel: Any, first: Any = None, codec: Any = CODEC, **options: Any
) -> Any:
    at = torch.tensor(numel if first is None else first)
    return PayloadPlan(form, budget, numel, **options).encode(codec, selection, at)


def decode(form: Any, payloads: Any, budget: Any, numel: Any, codec: Any = CODEC) -> Any:
    return PayloadPlan(form, budget, numel).decode(codec, payloads).wait()


def seal_(payload: Any) -> None:
    """Make the checksum fit the bytes, as a sender would that does not know better."""
    total = sum(int(w) * (2 * i + 1) for i, w in enumerate(payload.view(torch.int64).tolist()))
    total -= 3 * (int(payload[8:12].view(torch.int32)) & 0xFFFFFFFF)
    folded = ((total >> 32) ^ total) & 0xFFFFFFFF ^ 0x44474331
    payload[8:12] = torch.tensor(list(folded.to_bytes(4, "little")), dtype=torch.uint8)


def noise_in(payload: Any, generator: Any, share: float, first: int = 0) -> Any:
    """The payload with noise in a share of its bytes from `first` on. Other terms would be refused before it."""
    noise = torch.randint(0, 256, payload.shape, dtype=torch.uint8, generator=generator)
    some = torch.rand(payload.shape, generator=generator) < share
    some[:first] = some[16:24] = False
    return torch.where(some.to(payload.device), noise.to(payload.device), payload)
