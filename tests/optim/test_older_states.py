"""States that earlier versions saved load, and training continues as it did there.

The files have, by case, the states of two ranks after 3 steps, and the models 3 steps later. To write such a file
for another version, call `write` in its checkout.

    older_states.pt.xz     no identity, and one number of steps for all parameters
    nested_states.pt.xz    the state of a memory, and the ratio of a history, in tables of their own
"""

import copy
import io
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optim.nets import train
from torch import Tensor, nn

from dgc import compression as methods
from dgc.aggregate import Config, PowerSGD, optimizer_step
from dgc.comm.lockstep import LockstepWorld
from dgc.gossip import CHOCO, DPSGD, OSGP, SGP, PowerGossip, TopK
from dgc.local import Nesterov, OuterSteps, SlowMo, ZeroOneAdam, ZeroOneSteps
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import DGCSGD, DGCAdam, DistributedOptimizer, LocalOptimizer, OneBitAdam

OLDER, NESTED = (Path(__file__).with_name(f"{name}_states.pt.xz") for name in ("older", "nested"))
SAVED, CONTINUED = range(3), range(3, 6)


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float32) / 2)
    return model.float()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 5, generator=generator, dtype=torch.float32)
    return (model(inputs) - inputs[:, :2].sin()).square().mean()


class Run:
    """One rank of a case: a model, an optimizer, and the owner of the state of the method."""

    def __init__(self, transport: Any, make: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        self.rank, self.model = transport.rank, net()
        self.optimizer, self.owner = make(self.model, transport)
        prefix = "compression_" if self.optimizer is self.owner else ""
        self.save, self.restore = (getattr(self.owner, f"{verb}{prefix}state_dict") for verb in ("", "load_"))

    def train(self, steps: range) -> "Run":
        for step in steps:
            if self.optimizer is self.owner:
                train(self.model, self.optimizer, [step], self.rank, loss=loss_of)
            else:
                loss_of(self.model, step, self.rank).backward()
                optimizer_step(self.optimizer, self.owner)
        return self

    def state(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), self.save()))

    def load(self, state: Any) -> "Run":
        model, optimizer, own = copy.deepcopy(state)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.restore(own)
        return self

    def result(self) -> list[Tensor]:
        if isinstance(self.owner, LocalOptimizer):
            self.owner.method.flush()
        return [p.detach().clone() for p in self.model.parameters()]


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def dgc_sgd(parameters: Any) -> Any:
    return DGCSGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2)


def of(kind: Any, method: Callable[[], Any], make: Any, **options: Any) -> Any:
    """An optimizer of this kind around that of `make`."""

    def build(model: Any, transport: Any) -> Any:
        inner, named = make(model.parameters()), model.named_parameters()
        optimizer = kind(inner, named, method(), transport=transport, **options)
        return optimizer, optimizer

    return build


def exchanging(compression: Callable[[], Any], make: Any = sgd) -> Any:
    return of(DistributedOptimizer, compression, make, bucket_mb=1e-4)


def mixing(algorithm: Callable[[], Any], make: Any = sgd) -> Any:
    return of(LocalOptimizer, algorithm, make)


def aggregating(model: Any, transport: Any) -> Any:
    config = Config(1, 1.0, start_compressing_after_num_steps=1)
    return sgd(model.parameters()), PowerSGD(model.parameters(), config, transport)


def sparse(**options: Any) -> methods.SparseCompressor:
    return methods.SparseCompressor(0.1, ResidualMemory(), **options)


IN_TWO_PARTS: dict[str, Any] = {"fragment_mb": 40 * 4 / 2**20}
CASES: dict[str, Any] = {
    "dgc": exchanging(lambda: methods.DGCCompressor(0.1, DGCSGDMemory(momentum=0.9)), dgc_sgd),
    "top-k, vectors as int8": exchanging(lambda: sparse(dense_values="int8")),
    "PowerSGD": exchanging(lambda: methods.PowerSGDCompressor(rank=1, min_compression_rate=1)),
    "PowerSGD, adaptive": exchanging(
        lambda: methods.PowerSGDCompressor(rank=1, high_rank=2, min_compression_rate=0)
    ),
    "QSGD": exchanging(methods.QSGDCompressor),
    "signs": exchanging(methods.ScaledSignCompressor),
    "2 bits": exchanging(lambda: methods.ThresholdCompressor(threshold=0.05)),
    "DoubleSqueeze": exchanging(methods.DoubleSqueezeCompressor),
    "random k": exchanging(lambda: methods.RandomKCompressor(0.5)),
    "chunks": exchanging(lambda: methods.ChunkCompressor(0.3, ResidualMemory(), 8)),
    "1-bit Adam": exchanging(methods.OneBitAdamCompressor, lambda ps: OneBitAdam(ps, lr=0.05, freeze_step=2)),
    "DGC for Adam": exchanging(
        lambda: methods.DGCAdamCompressor(0.2), lambda ps: DGCAdam(ps, lr=0.05, freeze_step=2)
    ),
    "aggregate": aggregating,
    "SGP": mixing(SGP),
    "OSGP": mixing(OSGP),
    "D-PSGD": mixing(DPSGD),
    "CHOCO": mixing(lambda: CHOCO(quantizer=TopK(0.25))),
    "PowerGossip": mixing(lambda: PowerGossip(rank=1)),
    "SlowMo": mixing(lambda: OuterSteps(2, OSGP(), SlowMo())),
    "DiLoCo, top-k": mixing(lambda: OuterSteps(2, None, Nesterov(), sparse(vectors="sparse"))),
    "streaming": mixing(lambda: OuterSteps(4, None, Nesterov(), **IN_TWO_PARTS, delay=2)),
    "0/1 Adam": mixing(lambda: ZeroOneSteps(2, 1, 1, 3), lambda ps: ZeroOneAdam(ps, lr=0.05)),
}


def write(file: Path) -> None:
    found = {}
    for name, make in CASES.items():

        def body(transport: Any, make: Any = make) -> Any:
            state = Run(transport, make).train(SAVED).state()
            return state, Run(transport, make).load(state).train(CONTINUED).result()

        found[name] = LockstepWorld(2).run(body)
    whole = io.BytesIO()
    torch.save(found, whole, _use_new_zipfile_serialization=False)
    file.write_bytes(lzma.compress(whole.getvalue(), preset=9))


def read(file: Path) -> Any:
    return torch.load(io.BytesIO(lzma.decompress(file.read_bytes())), weights_only=True)


@pytest.mark.filterwarnings("ignore:this state does not say whose it is")
@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("file", [OLDER, NESTED], ids=["older", "nested"])
def test_a_state_of_an_earlier_version_continues(file: Path, name: str) -> None:
    saved = read(file)[name]

    def body(transport: Any) -> None:
        state, result = saved[transport.rank]
        run = Run(transport, CASES[name]).load(state)
        # matrix products differ in the last bits between processors
        torch.testing.assert_close(run.train(CONTINUED).result(), result, rtol=1e-3, atol=1e-4)

    LockstepWorld(2).run(body)
