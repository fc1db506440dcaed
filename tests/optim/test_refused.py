"""What DistributedOptimizer refuses or warns about, that momentum is applied once, and settings that differ."""

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import pytest
import torch
from cases import case
from on_ranks import on_ranks
from optim import wrappers
from optim.nets import alone, dgc, dgc_sgd, momentum_sgd, net, train, trained, values, wrap
from refusals import check_refusals, refuse
from torch import nn

from dgc import compression as methods
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.requests import AllReduce
from dgc.compression import DenseCompressor, DenseResult, DGCCompressor, Route, Rule
from dgc.core.bucket import make_bucket
from dgc.core.protocol import StatelessCompressor
from dgc.engine.agreement import describe
from dgc.engine.options import as_route
from dgc.gossip import DPSGD, from_weights
from dgc.local import OuterSteps
from dgc.memory import ClipByNorm, DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer, LocalOptimizer
from dgc.sparse.payloads import CastValues, PackedIndices
from dgc.sparse.selectors import Sampled


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def local(model: Any, transport: Any, make: Any) -> Any:
    return LocalOptimizer(make(model), model.named_parameters(), OuterSteps(2), transport=transport)


@pytest.mark.usefixtures("no_type_checks")
def test_wrong_named_parameters() -> None:
    model, pairs = net(), r"pairs of a name and a tensor.*model.named_parameters\(\)"
    named = list(model.named_parameters())
    wrapped = partial(DistributedOptimizer, momentum_sgd(model))
    no_pairs: Any = (model.parameters(), [*model.state_dict()], [("a", 1.0)], [(p, name) for name, p in named])
    check_refusals(
        (partial(wrapped, named[:-2], transport=alone()), "lacks 2 parameters"),
        (partial(wrapped, [("same", p) for _, p in named], transport=alone()), "same"),
        # pairs are checked before anything is started
        *((partial(wrapped, given), pairs) for given in no_pairs),
    )
    train(model, DistributedOptimizer(momentum_sgd(model), transport=alone()), [0])  # names may be left out


def wrap_own(models: Any, transport: Any) -> None:
    wrap(models[transport.rank], transport, sgd)


def test_different_models_name_the_rank() -> None:
    last = nn.Linear(4, 2)
    for other in (
        {"a": nn.Linear(3, 5), "b": nn.Linear(5, 2)},
        {"a": nn.Linear(3, 4), "c": last},
        {"a": nn.Linear(3, 4), "b": last, "c": nn.Linear(2, 2)},
    ):
        both = [nn.ModuleDict(layers) for layers in ({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)}, other)]
        with case(other), pytest.raises(ValueError, match="rank [01] and rank [01] train different models"):
            LockstepWorld(2).run(partial(wrap_own, both))


class OfAUser(StatelessCompressor):
    def __init__(self, seed: Any = 0, table: Any = (1.0,), speak: Any = None) -> None:
        self._seed, self.table, self.speak = seed, torch.tensor(table), speak

    def reduce(self, bucket: Any, state: Any) -> Any:
        return self.speak(bucket, state)


def no_result(bucket: Any, state: Any) -> Any:
    yield (AllReduce(bucket.flat),)


@pytest.mark.usefixtures("no_type_checks")
def test_a_custom_compressor_that_is_no_generator() -> None:
    for speak, words in (
        (lambda bucket, state: None, "reduce of OfAUser must be a generator.*yields.*not NoneType"),
        (lambda bucket, state: DenseResult(), "reduce of OfAUser must be a generator.*not DenseResult"),
        (no_result, "reduce of OfAUser must return a Reduced, not None"),
        (DenseCompressor().reduce, ""),  # a function that returns a generator
    ):
        with case(words), pytest.raises(ValueError, match=words) if words else nullcontext():
            trained(2, [0], compression=partial(OfAUser, speak=speak))


def test_bad_options() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        *(({"op": "adasum"}, "op must be"), ({"op": 2}, "op must be"), ({"bucket_mb": 0.0}, "bucket_mb")),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"nonfinite": "zero"}, "nonfinite must be 'skip' or 'raise', not 'zero'"),
    ]
    kinds: tuple[Any, ...] = (DenseCompressor, DGCCompressor, Route)
    check_refusals(
        *((partial(wrap, net(), alone(), **options), words) for options, words in bad),
        *((partial(as_route, k), rf"compression={k.__name__} is a class: pass an instance") for k in kinds),
    )
    with pytest.warns(UserWarning, match="bucket_mb"):
        wrap(net(), alone(), num_groups=2)


@pytest.mark.parametrize("kind", [*wrappers.KNOWN, wrappers.Lookahead])
@pytest.mark.parametrize("adapter", [wrap, local])
def test_an_optimizer_around_another_is_refused_where_it_would_be_stepped(adapter: Any, kind: Any) -> None:
    """What it does beside the step of the inner one, such as to unscale gradients, would be lost or done twice."""
    refuse("steps another optimizer, SGD, .* pass the SGD$", adapter, net(), alone(), lambda m: kind(sgd(m)))


def test_an_optimizer_that_evaluates_its_closure_itself_is_refused() -> None:
    words = "LBFGS evaluates its closure several times in a step"
    refuse(words, wrap, net(), alone(), lambda m: torch.optim.LBFGS(m.parameters()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("make", "compression"), [(momentum_sgd, None), (dgc_sgd, dgc(0.5))], ids=["dense", "dgc"]
)
def test_a_model_that_is_converted_after_wrapping_is_refused(dtype: Any, make: Any, compression: Any) -> None:
    model = net()
    optimizer = wrap(model, alone(), make, compression=copy.deepcopy(compression))
    train(model, optimizer, [0])
    model.to(dtype)
    optimizer.zero_grad()
    refuse(
        "the gradient of last.bias is .*, and was planned as torch.float32",
        model(torch.ones(1, 6, dtype=dtype)).sum().backward,
    )


def test_the_same_parameters_twice() -> None:
    transport, model = alone(), net()
    optimizer = wrap(model, transport)
    words = r"first.weight belongs to another DistributedOptimizer.*close\(\)"
    refuse(words, wrap, model, transport)
    refuse("DistributedOptimizer steps another optimizer, SGD", wrap, model, transport, lambda _: optimizer)
    optimizer.close()
    train(model, wrap(model, transport), [0])


def test_momentum_has_one_owner() -> None:
    refused: list[tuple[Any, Any, str]] = [
        (momentum_sgd, dgc(), "DGCSGD"),
        (momentum_sgd, DGCCompressor(0.1), "SGD would apply it again: use dgc.optim.DGCSGD"),
        (dgc_sgd, dgc(momentum=0.8), "momentum=0.8"),
        (dgc_sgd, dgc(nesterov=True), "nesterov=True, the optimizer momentum=0.9, nesterov=False"),
        (dgc_sgd, DGCCompressor(0.1, DGCSGDMemory(nesterov=True)), "nesterov=True, the optimizer momentum=0.9"),
        (partial(dgc_sgd, nesterov=True), dgc(), "nesterov=True"),
        (partial(dgc_sgd, dampening=0.1), dgc(), "dampening"),
        (lambda m: DGCSGD(m.parameters(), lr=0.1), dgc(), "momentum=0.0"),
    ]
    check_refusals(*((partial(wrap, net(), alone(), make, compression=c), words) for make, c, words in refused))


@pytest.mark.filterwarnings("ignore:the memory applies momentum only to compressed parameters")
def test_momentum_that_a_scheduler_cycles_has_two_owners() -> None:
    """DGCSGD has the memory's. SGD has none, until the scheduler gives it some."""
    for make, before in ((dgc_sgd, 0.9), (sgd, 0)):
        model = net()
        optimizer = wrap(model, alone(), make, compression=dgc())
        train(model, optimizer, [0])
        optimizer.param_groups[0]["momentum"] = 0.85  # as OneCycleLR does
        words = f"momentum of group 0 was {before} and is now 0.85.*memory applies.*cycle_momentum=False"
        refuse(words, train, model, optimizer, [1])


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_memory_without_a_momentum_of_its_own_takes_that_of_the_optimizer(nesterov: bool) -> None:
    def ends(memory: DGCSGDMemory | str) -> Any:
        inner = partial(dgc_sgd, nesterov=nesterov)
        return values(trained(1, range(4), inner, lambda: DGCCompressor(0.1, memory)))

    torch.testing.assert_close(ends("dgc"), ends(DGCSGDMemory(0.9, nesterov)), rtol=0, atol=0)
    groups = [{"params": [p], "momentum": 0.9 - 0.1 * i} for i, p in enumerate(net().parameters())]
    words = r"memory has momentum=0.9.*optimizer momentum=0\.[78].*must agree"
    refuse(words, DistributedOptimizer, DGCSGD(groups, lr=0.1), None, DGCCompressor(0.1), transport=alone())
    bucket = make_bucket("b", [("w", torch.zeros(4, 4))])
    refuse(r"^DGCSGDMemory\(\) takes the momentum of an optimizer", DGCCompressor(0.1).init, bucket, 1, 0)
    with pytest.warns(UserWarning, match="exchanged dense"):  # of SGD without momentum
        wrap(net(), alone(), sgd, compression=dgc())


def clipped(norm: float) -> Any:
    return DGCCompressor(0.1, DGCSGDMemory(0.9, gradient_clipping=ClipByNorm(norm)))


at_2bit = partial(methods.ThresholdCompressor, 2)


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
    ("ratio", 0.1, 0.2, dgc),
    ("memory.correction.momentum", 0.9, 0.8, lambda m: dgc(momentum=m)),
    ("memory.gradient_clipping.max_norm", 1.0, 2.0, clipped),
    ("selector.sample_ratio", 0.1, 0.2, lambda r: dgc(selector=Sampled(r))),
    ("format.values.dtype", "fp16", "bf16", lambda v: dgc(values=CastValues(v))),
    ("dense_values", "bf16", "int8", lambda v: dgc(dense_values=v)),
    ("vectors", "dense", "sparse", lambda v: dgc(vectors=v)),
    ("vector_ratio", 0.1, None, lambda r: dgc(vectors="sparse", vector_ratio=r)),
    ("warmup.warmup_coeff[1]", 0.2, 0.3, lambda c: dgc(warmup_epochs=2, warmup_coeff=[0.5, c])),
    ("rules[0].compressor.threshold", 1.0, 2.0, lambda t: Route([Rule(at_2bit(t)), Rule(DenseCompressor())])),
    ("rules[0].min_numel", 1, 2, lambda n: Route([Rule(DenseCompressor(), min_numel=n)])),
]
KINDS: list[tuple[Any, Any, str]] = [
    (DenseCompressor(), at_2bit(1.0), "compression is dgc.core.dense.DenseCompressor"),
    (methods.PowerSGDCompressor(1), methods.PowerSGDCompressor(2), "compression.rank is 1 on rank 0 and 2"),
    (dgc(), dgc(indices=PackedIndices()), "compression.format.indices is dgc.sparse.payloads.indices.PlainInd"),
    (OfAUser(1), OfAUser(1, (2.0,)), "compression.table is tensor of shape (1,), torch.float32"),
]


def refusal(*values: Any, make: Callable[[Any], Any] = lambda one: one, option: str = "compression") -> str:
    """What all ranks are told. values: of each rank. option: empty if `make` returns several."""

    def body(transport: Any) -> str:
        made = make(values[transport.rank])
        with pytest.raises(ValueError, match="every rank needs the same settings") as caught:
            wrap(nn.Linear(3, 3), transport, dgc_sgd, **({option: made} if option else made))
        return str(caught.value)

    (told,) = set(LockstepWorld(len(values)).run(body))
    return told


def test_the_setting_that_differs_is_named_on_every_rank() -> None:
    for rows, option in ((OPTIONS, ""), (COMPRESSIONS, "compression")):
        for path, first, last, make in rows:
            told, place = refusal(first, first, last, make=make, option=option), f"{option}.{path}".lstrip(".")
            assert told.startswith(f"{place} is {first!r} on rank 0 and {last!r} on rank 2"), told
    for one, other, words in KINDS:
        assert words in refusal(one, other)


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
        words = rf"^{re.escape(path)} is .* on rank 0 and .* on rank 1: every"
        refuse(words, LocalOptimizer, sgd(model), model.named_parameters(), method, transport=transport)


@on_ranks(2)
def test_values_of_a_rank_may_differ(transport: Any) -> None:
    rank, model = transport.rank, nn.Linear(3, 3)
    compression: Any = OfAUser(1)
    vars(compression).update(generator=torch.Generator().manual_seed(rank), module=nn.Linear(2 + rank, 2))
    vars(compression).update(device=torch.device("cuda", rank), itself=compression, transport=transport)
    compression.parameter = nn.Parameter(torch.full((2,), float(rank)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
    DistributedOptimizer(optimizer, model.named_parameters(), compression, transport=transport)


class Slotted:
    __slots__ = ("empty", "value")
    limit = 7

    def __init__(self) -> None:
        self.value = {3, 1}


@dataclass
class Settings:
    numbers: dict[str, tuple[float, ...]]
    function: object


def test_description() -> None:
    def text(**values: Any) -> str:
        return ", ".join(f"{path} {value}" for path, value in describe(**values).items()).replace(__name__, "here")

    Kind = Enum("Kind", "A")
    assert text(a=Settings({"x": (1.0, 2.0)}, partial(sorted, reverse=True)), b=Slotted(), c=Kind.A) == (
        "a here.Settings, a.numbers builtins.dict, a.numbers['x'] builtins.tuple, a.numbers['x'][0] 1.0, "
        "a.numbers['x'][1] 2.0, a.function functools.partial, a.function.func builtins.sorted, "
        "a.function.args builtins.tuple, a.function.keywords builtins.dict, a.function.keywords['reverse'] True, "
        "b here.Slotted, b.limit 7, b.value builtins.set, b.value[0] '1', b.value[1] '3', c <Kind.A: 1>"
    )
    assert text(d=torch.float16, e=object(), f=Slotted.__init__, g=None) == (
        "d torch.float16, e <object object>, f here.Slotted.__init__, g None"
    )
