"""All ranks must have the same settings before training starts."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from optim.nets import dgc_sgd, wrap
from torch import nn

from dgc import compression as methods
from dgc.comm.lockstep import LockstepWorld
from dgc.compression.protocol import StatelessCompressor
from dgc.engine.agreement import describe
from dgc.gossip import DPSGD, from_weights
from dgc.local import OuterSteps
from dgc.memory import ClipByNorm, DGCSGDMemory
from dgc.optim import DistributedOptimizer, LocalOptimizer
from dgc.selection import Sampled
from dgc.wire import CastValues, PackedIndices


class OfAUser(StatelessCompressor):
    def __init__(self, seed: Any, table: Any = (1.0,)) -> None:
        self._seed, self.table = seed, torch.tensor(table)

    def reduce(self, bucket: Any, state: Any) -> Any:
        raise AssertionError


def dgc(ratio: float = 0.1, momentum: float = 0.9, clipping: Any = None, **options: Any) -> Any:
    return methods.DGCCompressor(ratio, DGCSGDMemory(momentum, gradient_clipping=clipping), **options)


def at_2bit(threshold: Any) -> Any:
    return methods.ThresholdCompressor(threshold=threshold)


# (setting's path, its value on rank 0 and on the last rank, and the options with a value)
OPTIONS: list[tuple[str, Any, Any, Any]] = [
    ("op", "average", "sum", lambda op: {"op": op}),
    ("nonfinite", "skip", "raise", lambda n: {"nonfinite": n}),
    ("bucket_mb", 25.0, 24.0, lambda mb: {"bucket_mb": mb}),
    ("backward_passes_per_step", 1, 2, lambda n: {"backward_passes_per_step": n}),
    ("uses_grad_scaler", True, False, lambda used: {"grad_scaler": torch.amp.GradScaler("cpu", enabled=used)}),
]
# the same of the compression
COMPRESSIONS: list[tuple[str, Any, Any, Any]] = [
    ("threshold", 0.5, 0.25, at_2bit),
    ("threshold", 0.5, None, at_2bit),
    ("_seed", 0, 1, lambda s: methods.QSGDCompressor(seed=s)),
    ("_seed", 3, 4, OfAUser),
    ("compress_ratio", 0.1, 0.2, dgc),
    ("memory.correction.momentum", 0.9, 0.8, lambda m: dgc(momentum=m)),
    ("memory.gradient_clipping.max_norm", 1.0, 2.0, lambda n: dgc(clipping=ClipByNorm(n))),
    ("selector.sample_ratio", 0.1, 0.2, lambda r: dgc(selector=Sampled(r))),
    ("format.values.dtype", "fp16", "bf16", lambda v: dgc(values=CastValues(v))),
    ("dense_values", "bf16", "int8", lambda v: dgc(dense_values=v)),
    ("vectors", "dense", "sparse", lambda v: dgc(vectors=v)),
    ("vector_ratio", 0.1, None, lambda r: dgc(vectors="sparse", vector_ratio=r)),
    ("warmup.warmup_coeff[1]", 0.2, 0.3, lambda c: dgc(warmup_epochs=2, warmup_coeff=[0.5, c])),
    (
        "rules[0].compressor.threshold",
        1.0,
        2.0,
        lambda t: methods.Route([methods.Rule(at_2bit(t)), methods.Rule(methods.DenseCompressor())]),
    ),
    ("rules[0].min_numel", 1, 2, lambda n: methods.Route([methods.Rule(methods.DenseCompressor(), min_numel=n)])),
]


def compressing(make: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    return {"compression": make(value)}


def test_other_kinds_of_settings() -> None:
    indices = "compression.format.indices is dgc.wire.indices.PlainIndices on rank 0 and dgc.wire.ind"
    kinds: list[tuple[Any, Any, str]] = [
        (
            methods.DenseCompressor(),
            methods.ThresholdCompressor(),
            "compression is dgc.compression.dense.DenseCompressor",
        ),
        (methods.PowerSGDCompressor(1), methods.PowerSGDCompressor(2), "compression.rank is 1 on rank 0 and 2"),
        (dgc(), dgc(indices=PackedIndices()), indices),
        (OfAUser(1), OfAUser(1, (2.0,)), "compression.table is tensor of shape (1,), torch.float32"),
    ]
    for *both, words in kinds:
        assert words in refusals(2, partial(compressing, both.__getitem__))[0]


def refusals(size: int, options: Callable[[int], dict[str, Any]]) -> list[str]:
    """What each rank is told. options: of a rank."""

    def body(transport: Any) -> str:
        with pytest.raises(ValueError, match="every rank needs the same settings") as caught:
            wrap(nn.Linear(3, 3), transport, dgc_sgd, **options(transport.rank))
        return str(caught.value)

    return LockstepWorld(size).run(body)


def test_the_setting_that_differs_is_named_on_every_rank() -> None:
    def check(path: str, first: Any, last: Any, options: Callable[[Any], Any]) -> None:
        told = refusals(3, lambda rank: options(last if rank == 2 else first))
        assert told == [told[0]] * 3
        assert told[0].startswith(f"{path} is {first!r} on rank 0 and {last!r} on rank 2"), told[0]

    for row in OPTIONS:
        check(*row)
    for path, first, last, make in COMPRESSIONS:
        check(f"compression.{path}", first, last, partial(compressing, make))


@on_ranks(2)
def test_gossip_algorithms_too(transport: Any) -> None:
    def weighted(own: Any) -> Any:
        return lambda size: from_weights([[[own, 1 - own], [1 - own, own]]])

    rank, model = transport.rank, nn.Linear(3, 3)
    for path, method in (
        ("method", OuterSteps(2) if rank else DPSGD()),
        ("method.average_every", OuterSteps(2 + rank)),
        ("method._graphs[0].own", DPSGD(weighted(0.5 + 0.1 * rank))),
    ):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=rf"^{re.escape(path)} is .* on rank 0 and .* on rank 1: every"):
            LocalOptimizer(sgd, model.named_parameters(), method, transport=transport)


@on_ranks(2)
def test_values_of_a_rank_may_differ(transport: Any) -> None:
    """Learning rates, random number generators, parameters before a broadcast, numbers of devices."""
    rank, model = transport.rank, nn.Linear(3, 3)
    compression: Any = OfAUser(1)
    compression.generator = torch.Generator().manual_seed(rank)
    compression.module = nn.Linear(2 + rank, 2)
    compression.parameter = nn.Parameter(torch.full((2,), float(rank)))
    compression.device, compression.itself = torch.device("cuda", rank), compression
    compression.transport = transport
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
    DistributedOptimizer(optimizer, model.named_parameters(), compression, transport=transport)


@dataclass
class Settings:
    numbers: dict[str, tuple[float, ...]]
    function: object


class Slotted:
    __slots__ = ("empty", "value")
    limit = 7

    def __init__(self) -> None:
        self.value = {3, 1}


class Kind(Enum):
    A = 1


def test_description() -> None:
    texts = describe(a=Settings({"x": (1.0, 2.0)}, partial(sorted, reverse=True)), b=Slotted(), c=Kind.A)
    here = __name__
    assert texts == {
        "a": f"{here}.Settings",
        "a.numbers": "builtins.dict",
        "a.numbers['x']": "builtins.tuple",
        "a.numbers['x'][0]": "1.0",
        "a.numbers['x'][1]": "2.0",
        "a.function": "functools.partial",
        "a.function.func": "builtins.sorted",
        "a.function.args": "builtins.tuple",
        "a.function.keywords": "builtins.dict",
        "a.function.keywords['reverse']": "True",
        "b": f"{here}.Slotted",
        "b.limit": "7",
        "b.value": "builtins.set",
        "b.value[0]": "'1'",
        "b.value[1]": "'3'",
        "c": "<Kind.A: 1>",
    }
    assert describe(d=torch.float16, e=object(), f=Slotted.__init__, g=None) == {
        "d": "torch.float16",
        "e": "<object object>",
        "f": f"{here}.Slotted.__init__",
        "g": "None",
    }
