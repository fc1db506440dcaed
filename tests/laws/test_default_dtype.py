"""Results under a default dtype of fp16 are those under fp32, bit for bit."""

import ast
import copy
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from gossip.networks import MORE, OUTER, ROWS, Trained
from gossip.test_adpsgd import Simulation
from kernels.backends import CODECS
from laws.table import DEFINITIONS, TABLE, Row
from optim.nets import data, dgc, dgc_sgd, net, wrap
from sparse.payloads import FORMATS, budget_of, decode, encode, scattered, selection_of
from sparse.shapes import SHAPES as DATA
from sparse.test_selectors import SELECTORS, chosen_by, quota_for
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dgc.kernels as kernels
from dgc import gossip
from dgc.comm.collectives import all_gather_object, barrier, broadcast_object
from dgc.comm.lockstep import LockstepTransport, LockstepWorld
from dgc.compression import Compressor, DGCCompressor, OneBitAdamCompressor, QSGDCompressor
from dgc.contrib import CHOCO, ZeroOneAdam, ZeroOneSteps
from dgc.gossip import Gossip, HierarchicalGossip
from dgc.gossip.graphs import bipartite_complete
from dgc.memory import ClipByGlobalNorm, ClipByNorm, ClipByValue, Clipping, DGCSGDMemory
from dgc.optim import LocalOptimizer, OneBitAdam
from dgc.testing import LIKE, Fleet, gradients

ROOT = Path(__file__).parents[2]
CONSTRUCTORS = set(
    "arange empty empty_strided eye full linspace logspace normal ones rand randint randn randperm tensor zeros "
    "as_tensor scalar_tensor from_numpy Tensor".split()
)
pytestmark = pytest.mark.usefixtures("no_type_checks")


class Declared(TorchDispatchMode):
    """No operation takes its dtype from the default: floats come from floats, or the operation names a dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, given = func(*args, **(kwargs or {})), tree_leaves((args, kwargs))
        if isinstance(made, Tensor) and made.is_floating_point():
            tensors = [x for x in given if isinstance(x, Tensor)]
            declared = any(isinstance(x, torch.dtype) for x in given)
            assert declared or any(x.is_floating_point() for x in tensors), f"{func}: {[x.dtype for x in tensors]}"
        return made


def check(history: Callable[[], list[Tensor]]) -> None:
    """`history` gives the same tensors, bit for bit, under another default dtype, and never depends on it."""
    before = torch.get_default_dtype()
    with Declared():
        expected = history()
    torch.set_default_dtype(torch.float16)  # the fixture in conftest.py resets it after a failure
    found = history()
    torch.set_default_dtype(before)
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.dtype == theirs.dtype, i
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (ours, theirs))), i


def undeclared(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and all(keyword.arg != "dtype" for keyword in node.keywords):
            module, _, name = ast.unparse(node.func).rpartition(".")
            if module == "torch" and name in CONSTRUCTORS:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_every_tensor_is_made_with_a_dtype() -> None:
    assert undeclared("x = torch.zeros(3, device=d)") == ["line 1: torch.zeros(3, device=d)"]
    found = {str(path.relative_to(ROOT)): undeclared(path.read_text()) for path in ROOT.glob("dgc/**/*.py")}
    assert len(found) > 100
    assert {path: calls for path, calls in found.items() if calls} == {}


def history(make: Callable[[], Compressor], size: int) -> list[Tensor]:
    fleet, found = Fleet(make, size, LIKE), []
    for step in range(4):
        own = [gradients(rank, step) for rank in range(size)]
        if step == 1:
            own[0][2][1, 2, 3] = torch.nan
        means = fleet.step(own)
        assert all(torch.equal(means[0], mean) for mean in means) or step == 1
        found += [error for compressor in fleet.states for error in compressor.errors()]
        if fleet.nonfinite[0] is None:
            found.append(means[0])
        if step == 2:
            other = Fleet(make, size, LIKE)
            for old, new in zip(fleet.states, other.states, strict=True):
                new.load_state_dict(old.state_dict())
            fleet = other
    assert len(found) > 2
    return found


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_compressors(row: Row) -> None:
    """Some gather with two ranks what they reduce with three."""
    check(lambda: [t for size in ((2, 3) if row.by_size else (2,)) for t in history(row.make, size)])
    if row.dense_limit is not None:
        with Declared():
            history(row.dense_limit, 2)


@pytest.mark.proof
def test_compressors_in_plain_torch() -> None:
    kernels.use("reference")
    try:
        for row in TABLE:
            with Declared() if row not in DEFINITIONS else nullcontext():
                history(row.make, 2)
    finally:
        kernels.use("auto")


@pytest.mark.parametrize("name", SELECTORS)
def test_selectors(name: str) -> None:
    sizes = (1500, 300, 0, 3, 1)
    data = [make(sum(sizes)) for make in DATA.values()]

    def chosen() -> list[Tensor]:
        quota = quota_for(*sizes, ratio=0.01)
        return [chosen_by(SELECTORS[name], v, quota, 1) for v in data]

    check(chosen)


def test_payloads() -> None:
    count, numel = 131, 3000
    budget, selection = budget_of(count, 0, 20, numel), selection_of(scattered(numel, count))

    def coded() -> list[Tensor]:
        found = []
        for codec, form in product(CODECS.values(), FORMATS.values()):
            made = encode(form, selection, budget, numel, None, codec)
            (got,), _ = decode(form, [made.payload], budget, numel, codec)
            found += [made.payload, made.own, got.indices, got.values, got.count]
        return found

    check(coded)
    assert encode(FORMATS["fp32 int64"], selection, budget, numel).payload.dtype == torch.uint8


def declared(body: Callable[[LockstepTransport], list[Tensor]]) -> Callable[[LockstepTransport], list[Tensor]]:
    def watched(transport: LockstepTransport) -> list[Tensor]:
        with Declared() if torch.get_default_dtype() == torch.float32 else nullcontext():
            return body(transport)

    return watched


def average_models(make: Callable[[], Gossip], world: LockstepWorld) -> list[Tensor]:
    def body(transport: LockstepTransport) -> list[Tensor]:
        own = Trained(transport, make())
        own.go_apart()
        own.scatter()
        for step in range(4):
            own.optimizer.begin_epoch(step // 2)
            own.step()
        state, first = own.optimizer.compression_state_dict(), own.finish()
        end = Trained(transport, make()).resume(state)
        end.step()
        return [first, *(p.detach().clone() for p in own.model.parameters()), end.z.clone()]

    return [tensor for found in world.run(declared(body)) for tensor in found]


GOSSIP = {row.name: row.make for row in [*ROWS, *OUTER, *MORE] if not row.by_timing}


@pytest.mark.parametrize("make", GOSSIP.values(), ids=GOSSIP)
def test_gossip(make: Callable[[], Gossip]) -> None:
    check(lambda: average_models(make, LockstepWorld(2)))


def test_gossip_between_machines() -> None:
    check(lambda: average_models(lambda: HierarchicalGossip(CHOCO(gossip.grid)), LockstepWorld(4, 2)))


def test_gossip_of_asynchronous_ranks() -> None:
    def averaged() -> list[Tensor]:
        simulation = Simulation(bipartite_complete(4), seed=4)
        simulation.run(160)
        simulation.drain()
        return simulation.xs

    check(averaged)


START, BATCHES = net(), [[data(step, rank) for rank in range(2)] for step in range(5)]


def onebit_adam(model: torch.nn.Module, transport: LockstepTransport) -> Any:
    adam = OneBitAdam(model.parameters(), lr=0.01, freeze_step=2)
    return wrap(model, transport, lambda _: adam, compression=OneBitAdamCompressor())


def zero_one_adam(model: torch.nn.Module, transport: LockstepTransport) -> Any:
    adam = ZeroOneAdam(model.parameters(), lr=0.01)
    return LocalOptimizer(adam, model.named_parameters(), ZeroOneSteps(2, 1, 1, 2), transport=transport)


def clipped(clipping: Clipping, model: torch.nn.Module, transport: LockstepTransport) -> Any:
    memory = DGCSGDMemory(0.9, gradient_clipping=clipping)
    return wrap(model, transport, dgc_sgd, compression=DGCCompressor(0.1, memory))


NESTEROV = partial(dgc_sgd, nesterov=True, weight_decay=1e-2)
CLIPPINGS = (ClipByNorm(0.1), ClipByValue(0.1), ClipByGlobalNorm(0.1))
TRAININGS: dict[str, Callable[[torch.nn.Module, LockstepTransport], Any]] = {
    "dense": wrap,
    "momentum sgd, qsgd": lambda model, t: wrap(model, t, compression=QSGDCompressor(), bucket_mb=1e-4),
    "nesterov": lambda model, t: wrap(model, t, NESTEROV, compression=dgc(0.1, nesterov=True)),
    **{type(clipping).__name__: partial(clipped, clipping) for clipping in CLIPPINGS},
    "bf16": lambda model, t: wrap(model.to(torch.bfloat16), t, dgc_sgd, compression=dgc(0.1)),
    "1-bit adam": onebit_adam,
    "1-bit adam, bf16": lambda model, t: onebit_adam(model.to(torch.bfloat16), t),
    "0/1 adam": zero_one_adam,
    "0/1 adam, bf16": lambda model, t: zero_one_adam(model.to(torch.bfloat16), t),
}


@pytest.mark.filterwarnings("ignore:.*has NaN or inf")
@pytest.mark.parametrize("make", TRAININGS.values(), ids=TRAININGS)
def test_optimizers(make: Callable[[torch.nn.Module, LockstepTransport], Any]) -> None:
    def body(transport: LockstepTransport) -> list[Tensor]:
        model = copy.deepcopy(START)
        optimizer = make(model, transport)
        for step, batch in enumerate(BATCHES):
            x, y = (t.to(model.last.weight.dtype) for t in batch[transport.rank])
            optimizer.zero_grad()
            ((model(x) - y).square().mean() * (torch.nan if step == 1 else 1.0)).backward()
            optimizer.step()
            if step == 2:
                optimizer.load_compression_state_dict(copy.deepcopy(optimizer.compression_state_dict()))
        assert optimizer.dropped_steps == 1
        return [p.detach().clone() for p in model.parameters()]

    check(lambda: [t for found in LockstepWorld(2).run(declared(body)) for t in found])


def test_objects() -> None:
    def body(transport: LockstepTransport) -> object:
        barrier(transport)
        return broadcast_object(transport, list(range(3000))), all_gather_object(transport, "x" * transport.rank)

    torch.set_default_dtype(torch.float16)
    assert LockstepWorld(3).run(body) == [(list(range(3000)), ["", "x", "xx"])] * 3


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_law_holds(dtype: str) -> None:
    laws = str(Path(__file__).with_name("test_laws.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", laws]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"LAWS_DEFAULT_DTYPE": dtype}, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()[-3000:]
