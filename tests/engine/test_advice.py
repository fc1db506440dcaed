"""Warnings of methods that lose quality with an optimizer, and of a resumed run without its residual."""

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optim import nets
from sharding import fsdp, fully_shard
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dgc import compression as methods
from dgc import contrib, ddp
from dgc.comm.torch_distributed import connect
from dgc.comm.transport import Transport
from dgc.local import Nesterov, OuterSteps
from dgc.memory import ResidualMemory
from dgc.optim import DGCAdam, DistributedOptimizer, LocalOptimizer, OneBitAdam

pytestmark = [
    pytest.mark.usefixtures("no_type_checks"),
    pytest.mark.filterwarnings("ignore:.*sends .* tensors dense"),
]
ADAPTERS = ("DistributedOptimizer", "DDP", "DDP without the optimizer", "FSDP2", "LocalOptimizer")


@pytest.fixture(scope="module")
def transport() -> Iterator[Transport]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield connect(hierarchical=True)
    dist.destroy_process_group()


def powersgd() -> Any:
    return methods.PowerSGDCompressor(1, min_compression_rate=0)


def sparse() -> Any:
    return methods.SparseCompressor(0.1, ResidualMemory())


class Trained:
    """A model with an adapter of a name in ADAPTERS."""

    def __init__(self, adapter: str, optimizer: Any, compression: Any, transport: Any):
        self.model: Any = nets.net()
        if adapter.startswith("DDP"):
            self.model = DistributedDataParallel(self.model)
        elif adapter == "FSDP2":
            self.model = fully_shard(self.model, mesh=fsdp.local_mesh(transport))
        self.optimizer = self.owner = optimizer(self.model.parameters())
        named = self.model.named_parameters()
        if adapter == "DistributedOptimizer":
            self.owner = DistributedOptimizer(self.optimizer, named, compression, transport=transport)
        elif adapter == "LocalOptimizer":
            steps = OuterSteps(1, outer=Nesterov(), compression=compression)
            self.owner = LocalOptimizer(self.optimizer, named, steps, transport=transport)
        elif adapter == "FSDP2":
            self.owner = fsdp.compress(self.model, compression, transport=transport)
        else:
            given = self.optimizer if adapter == "DDP" else None
            self.owner = ddp.compress(self.model, compression, given, transport=transport)
        self.steps = self.owner if hasattr(self.owner, "step") else self.optimizer

    def train(self, steps: int = 1) -> None:
        for step in range(steps):
            self.steps.zero_grad()
            nets.loss_of(self.model, step).backward()
            self.steps.step()


def warned(act: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(warning.message) for warning in caught if "dense, because" not in str(warning.message)]


ADAMS: dict[str, Any] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "OneBitAdam": partial(OneBitAdam, freeze_step=3),
}
POOR: list[tuple[Any, str]] = [
    (powersgd, "PowerSGDCompressor loses quality with Adam"),
    (sparse, "SparseCompressor sends an element seldom"),
    (lambda: methods.DGCCompressor(0.1, ResidualMemory()), "DGCCompressor sends an element seldom"),
    (methods.ScaledSignCompressor, "ScaledSignCompressor ruins Adam's step"),
    (methods.SignSGDCompressor, "SignSGDCompressor ruins Adam's step"),
    (contrib.DoubleSqueezeCompressor, "DoubleSqueezeCompressor ruins Adam's step"),
    (methods.ThresholdCompressor, "ThresholdCompressor is for SGD"),
]


@pytest.mark.parametrize("optimizer", ADAMS.values(), ids=ADAMS)
@pytest.mark.parametrize(("make", "words"), POOR)
def test_a_method_that_was_measured_poor_with_adam_warns_once(optimizer: Any, make: Any, words: str) -> None:
    (message,) = warned(lambda: Trained("DistributedOptimizer", optimizer, make(), nets.alone()))
    assert message.startswith(words) and message.endswith(": use TwoPhaseCompressor(bits=8)")
    assert "see docs/" in message


GOOD: list[tuple[Any, Any]] = [
    *((torch.optim.SGD, make) for make, _ in POOR),
    (torch.optim.AdamW, lambda: methods.TwoPhaseCompressor(bits=4)),
    (torch.optim.AdamW, methods.FP16Compressor),
    (torch.optim.AdamW, lambda: methods.SparseCompressor(1.0, ResidualMemory())),
    (partial(OneBitAdam, freeze_step=3), methods.OneBitAdamCompressor),
    (partial(DGCAdam, freeze_step=3), lambda: methods.DGCAdamCompressor(0.1)),
]


@pytest.mark.parametrize(("optimizer", "make"), GOOD)
def test_a_method_that_suits_its_optimizer_does_not_warn(optimizer: Any, make: Any) -> None:
    assert warned(lambda: Trained("DistributedOptimizer", optimizer, make(), nets.alone())) == []


@pytest.mark.parametrize("adapter", ADAPTERS[:4])
def test_every_adapter_of_gradients_warns_of_a_method_by_the_first_step(adapter: str, transport: Any) -> None:
    messages = warned(lambda: Trained(adapter, torch.optim.AdamW, powersgd(), transport).train(2))
    assert [message.startswith("PowerSGDCompressor loses quality") for message in messages] == [True]


def test_local_steps_of_adam_do_not_warn_of_their_pseudo_gradients(transport: Any) -> None:
    assert warned(lambda: Trained("LocalOptimizer", torch.optim.AdamW, powersgd(), transport).train(2)) == []


# --- a resumed run without its residual ---------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
LOST = "has taken steps, and the exchange none, so its residual is empty"
KNOWN = [adapter for adapter in ADAPTERS if adapter != "DDP without the optimizer"]
with_both = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def resumed(adapter: str, optimizer: Any, transport: Any, compression: Any, also: bool) -> list[str]:
    """The warnings of a run that loads the optimizer's state, and with `also` the exchange's state."""
    first = Trained(adapter, optimizer, compression(), transport)
    first.train(3)
    states = copy.deepcopy((first.optimizer.state_dict(), first.owner.compression_state_dict()))
    second = Trained(adapter, optimizer, compression(), transport)

    def go_on() -> None:
        second.optimizer.load_state_dict(states[0])
        if also:
            second.owner.load_compression_state_dict(states[1])
        second.train(2)

    return warned(go_on)


def four_bits() -> Any:
    return methods.TwoPhaseCompressor(bits=4)


@with_both
@pytest.mark.parametrize("adapter", KNOWN)
def test_a_resumed_optimizer_without_the_state_of_its_exchange_warns_once(
    adapter: str, optimizer: Any, transport: Any
) -> None:
    messages = resumed(adapter, optimizer, transport, four_bits, also=False)
    assert [LOST in message for message in messages] == [True]


@with_both
@pytest.mark.parametrize("adapter", KNOWN)
def test_a_resumed_optimizer_with_the_state_of_its_exchange_does_not_warn(
    adapter: str, optimizer: Any, transport: Any
) -> None:
    assert resumed(adapter, optimizer, transport, four_bits, also=True) == []


@with_both
def test_an_exchange_that_keeps_no_residual_does_not_warn(optimizer: Any, transport: Any) -> None:
    assert resumed("DistributedOptimizer", optimizer, transport, methods.FP16Compressor, also=False) == []


@with_both
@pytest.mark.parametrize("adapter", KNOWN)
def test_a_new_run_does_not_warn(adapter: str, optimizer: Any, transport: Any) -> None:
    assert warned(lambda: Trained(adapter, optimizer, four_bits(), transport).train(2)) == []


def test_adamw_that_becomes_onebit_adam_does_not_warn(transport: Any) -> None:
    before: Any = nets.net()
    adamw = torch.optim.AdamW(before.parameters())
    nets.train(before, adamw, range(3), loss=nets.loss_of)
    optimizer = partial(OneBitAdam, freeze_step=5)
    after = Trained("DistributedOptimizer", optimizer, methods.OneBitAdamCompressor(), transport)
    after.owner.load_state_dict(adamw.state_dict())
    assert warned(after.train) == []


def test_a_parameter_without_matrices_is_not_judged() -> None:
    class Vector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8))

    model = Vector()
    optimizer = torch.optim.AdamW(model.parameters())
    named = model.named_parameters()
    signs = methods.ScaledSignCompressor()
    assert warned(lambda: DistributedOptimizer(optimizer, named, signs, transport=nets.alone())) == []
