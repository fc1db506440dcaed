"""A memory with the states of its buckets, used as a compressor uses it."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dgc.comm.requests import Conversation
from dgc.core.bucket import Bucket, make_bucket
from dgc.core.protocol import Compressor
from dgc.core.results import Reduced
from dgc.core.state import State
from dgc.engine.state import BucketStates
from dgc.kernels import PassInputs, SparseVector
from dgc.memory import Memory

SHAPES: dict[str, Any] = {"a": (4, 3), "b": (5,), "c": (2, 3, 2, 2)}


def bucket_of(name: str = "b", seed: int = 0, dtype: Any = torch.float32, **shapes: Any) -> Any:
    bucket = make_bucket(name, [(n, torch.zeros(s, dtype=dtype)) for n, s in (shapes or SHAPES).items()])
    bucket.flat.copy_(torch.randn(bucket.numel, generator=torch.Generator().manual_seed(seed)))
    return bucket


class OfMemory(Compressor):
    """The states of a memory alone, under its name."""

    def __init__(self, memory: Memory):
        self.memory = memory

    @property
    def class_name(self) -> str:
        return type(self.memory).__name__

    def init(self, bucket: Bucket, size: int, rank: int) -> State:
        return self.memory.init(bucket, size, rank)

    def reduce(self, bucket: Bucket, state: Any) -> Conversation[Reduced]:
        raise AssertionError("only the states of a memory are used")


class Held(BucketStates):
    """The steps of one rank. `rollback` undoes what was sent since the last pass."""

    def __init__(self, memory: Memory):
        super().__init__(OfMemory(memory))
        self.memory = memory

    def plan(self, bucket: Bucket) -> None:
        self.add(bucket, 1, 0)

    def pass_inputs(self, bucket: Bucket) -> PassInputs:
        inputs = self.memory.pass_inputs(bucket, self[bucket])
        self[bucket] = self._dropped[bucket.name] = self[bucket].next(sent=None, returned=None)
        return inputs

    def sent_(self, bucket: Bucket, sent: SparseVector, returned: SparseVector | None = None) -> None:
        self[bucket] = self[bucket].after(sent, returned)

    def sent_all_(self, bucket: Bucket, values: Tensor) -> None:
        errors = {table: v - values for table, v in self[bucket].errors.items()}
        self[bucket] = replace(self[bucket], errors=errors)
