"""What all adapters have in common. Each trains the same small model, on one rank."""

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharding import fsdp, fully_shard
from states import assert_equal
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dgc import ddp
from dgc.aggregate import Config, PowerSGD, optimizer_step
from dgc.comm.torch_distributed import connect
from dgc.comm.transport import Transport
from dgc.compression import NonFiniteGradientError, PowerSGDCompressor, SparseCompressor
from dgc.local import Nesterov, OuterSteps
from dgc.memory import ResidualMemory
from dgc.optim import DistributedOptimizer, LocalOptimizer

pytestmark = [
    pytest.mark.usefixtures("no_type_checks"),
    pytest.mark.filterwarnings("ignore:.*sends .* tensors dense"),
]


@pytest.fixture(scope="module")
def transport() -> Iterator[Transport]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield connect(hierarchical=True)
    dist.destroy_process_group()


class Scaled(nn.Module):
    """Its backward pass has no matrix product, so that autocast does not change the gradients."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(12, 8, generator=generator))
        self.vector = nn.Parameter(torch.randn(8, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.matrix * self.vector).sin()


@dataclass
class Trained:
    """A model with its adapter. owner: what has the state of the exchange."""

    model: Any
    owner: Any
    optimizer: Any
    step: Callable[[], object]

    def backward(self, number: int, scale: float = 1.0) -> None:
        self.optimizer.zero_grad()
        x = torch.randn(5, 12, 8, generator=torch.Generator().manual_seed(number))
        (scale * self.model(x).square().mean()).backward()

    def spoilt(self, number: int, is_spoilt: bool) -> None:
        """A step, whose gradients have NaN if `is_spoilt`."""
        try:
            self.backward(number, torch.nan if is_spoilt else 1.0)
        finally:
            self.step()

    def state(self) -> Any:
        return (getattr(self.owner, "compression_state_dict", None) or self.owner.state_dict)()

    def load(self, state: Any) -> None:
        (getattr(self.owner, "load_compression_state_dict", None) or self.owner.load_state_dict)(state)

    def weights(self) -> list[Tensor]:
        return [getattr(p, "to_local", lambda p=p: p)().detach().clone() for p in self.model.parameters()]


def powersgd() -> PowerSGDCompressor:
    return PowerSGDCompressor(2, min_compression_rate=0, orthogonalization="gram_schmidt")


def sparse() -> SparseCompressor:
    return SparseCompressor(0.2, ResidualMemory())


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def in_optimizer(transport: Any, make: Any = powersgd, **options: Any) -> Trained:
    model = Scaled()
    own = DistributedOptimizer(sgd(model), model.named_parameters(), make(), transport=transport, **options)
    return Trained(model, own, own, own.step)


def in_ddp(transport: Any, make: Any = powersgd, **options: Any) -> Trained:
    model = DistributedDataParallel(Scaled())
    exchange, own = ddp.compress(model, make(), transport=transport, **options), sgd(model)
    return Trained(model, exchange, own, own.step)


def in_fsdp(transport: Any, make: Any = powersgd, **options: Any) -> Trained:
    model: Any = fully_shard(Scaled(), mesh=fsdp.local_mesh(transport))
    exchange, own = fsdp.compress(model, make(), transport=transport, **options), sgd(model)
    return Trained(model, exchange, own, own.step)


def in_quantized_fsdp(transport: Any, **options: Any) -> Trained:
    model: Any = fully_shard(Scaled(), mesh=init_device_mesh("cpu", (1,)))
    quantizer, own = fsdp.quantize(model, 4, 8, hadamard=True, **options), sgd(model)
    return Trained(model, quantizer, own, own.step)


def in_local_steps(transport: Any, make: Any = powersgd, **options: Any) -> Trained:
    model, steps = Scaled(), OuterSteps(1, None, Nesterov(), make())
    own = LocalOptimizer(sgd(model), model.named_parameters(), steps, transport=transport, **options)
    return Trained(model, own, own, own.step)


def in_aggregator(transport: Any) -> Trained:
    model, config = Scaled(), Config(2, 0, 1, 0, "gram_schmidt")
    own, aggregator = sgd(model), PowerSGD(model.parameters(), config, transport)
    return Trained(model, aggregator, own, lambda: optimizer_step(own, aggregator))


ADAPTERS: dict[str, Any] = {
    "DistributedOptimizer": in_optimizer,
    "DDP": in_ddp,
    "FSDP2": in_fsdp,
    "FSDP2, quantized": in_quantized_fsdp,
    "LocalOptimizer": in_local_steps,
    "aggregate": in_aggregator,
}
every_adapter = pytest.mark.parametrize("build", ADAPTERS.values(), ids=ADAPTERS)


@every_adapter
def test_training_inside_autocast_has_the_same_bits(transport: Transport, build: Any) -> None:
    inside, outside = build(transport), build(transport)
    for number in range(3):
        outside.backward(number)
        outside.step()
        with torch.autocast("cpu", torch.bfloat16):
            inside.backward(number)
            inside.step()
    assert all(map(torch.equal, inside.weights(), outside.weights()))


TOO_EARLY = r"state_dict\(\) (while|between) .*set a flag, for the loop to save after step\(\)"


def trained_with_saves_inside_steps(trained: Trained, steps: int) -> list[RuntimeError]:
    """Trains, and tries to save inside each step but the first. Returns what the attempts raised."""
    raised: list[RuntimeError] = []

    def save(*_: Any) -> None:
        with pytest.raises(RuntimeError, match=TOO_EARLY) as error:
            trained.state()
        raised.append(error.value)

    for number in range(steps):
        if number == 1:  # it is known then that this optimizer takes the steps
            getattr(trained.optimizer, "inner", trained.optimizer).register_step_pre_hook(save)
        trained.backward(number)
        trained.step()
    return raised


@every_adapter
def test_a_state_inside_a_step_is_refused(transport: Transport, build: Any) -> None:
    assert len(trained_with_saves_inside_steps(build(transport), 2)) == 1


@every_adapter
def test_refused_states_inside_steps_do_not_change_the_training(transport: Transport, build: Any) -> None:
    own, other = build(transport), build(transport)
    trained_with_saves_inside_steps(own, 3)
    for number in range(3):
        other.backward(number)
        other.step()
    assert all(map(torch.equal, own.weights(), other.weights()))
    assert_equal(own.state(), other.state())


IN_THEIR_STEP = {"LocalOptimizer": in_local_steps, "aggregate": in_aggregator}  # use gradients in their step only
DURING_BACKWARD = {name: build for name, build in ADAPTERS.items() if name not in IN_THEIR_STEP}


def after_backward(build: Any, transport: Transport) -> tuple[Trained, Any]:
    """An adapter between the second backward() and its step(), with the state after the first step."""
    trained = build(transport)
    trained.backward(0)
    trained.step()
    before = copy.deepcopy(trained.state())
    trained.backward(1)
    return trained, before


@pytest.mark.parametrize("build", DURING_BACKWARD.values(), ids=DURING_BACKWARD)
def test_a_state_after_backward_is_refused_until_the_step(transport: Transport, build: Any) -> None:
    trained, _ = after_backward(build, transport)
    with pytest.raises(RuntimeError, match=TOO_EARLY):
        trained.state()
    trained.step()
    trained.state()


@pytest.mark.parametrize("build", IN_THEIR_STEP.values(), ids=IN_THEIR_STEP)
def test_backward_leaves_the_state_to_the_step_where_the_step_exchanges(transport: Transport, build: Any) -> None:
    trained, before = after_backward(build, transport)
    assert_equal(trained.state(), before)
    trained.step()
    trained.state()


@pytest.mark.parametrize("build", [in_ddp, in_fsdp])
def test_a_state_after_a_step_that_was_left_out_is_taken(transport: Transport, build: Any) -> None:
    trained = build(transport)
    trained.backward(0)
    trained.step()
    trained.backward(1)
    trained.optimizer.zero_grad()
    trained.state()


TAKING = ("DistributedOptimizer", "DDP", "FSDP2", "LocalOptimizer")  # a compressor of any kind
KEEPING = {**ADAPTERS, **{f"{name}, sparse": partial(ADAPTERS[name], make=sparse) for name in TAKING}}
del KEEPING["FSDP2, quantized"]


@pytest.mark.parametrize("build", KEEPING.values(), ids=KEEPING)
def test_training_changes_no_state_that_was_saved_or_loaded(transport: Transport, build: Any) -> None:
    """On one rank FSDP2's own collectives keep no error: tests/parallel/test_fsdp_quantized.py has the same."""
    own, other = build(transport), build(transport)
    for number in range(3):
        own.backward(number)
        own.step()
    saved = own.state()
    before = copy.deepcopy(saved)
    other.load(loaded := copy.deepcopy(saved))
    for number in range(3, 6):
        for trained, state in ((own, saved), (other, loaded)):
            trained.backward(number)
            trained.step()
            assert_equal(state, before)
    with pytest.raises(AssertionError):
        assert_equal(own.state(), before)


@pytest.mark.filterwarnings("ignore:.*drops (this|its) step")
@pytest.mark.parametrize("build", [b for b in ADAPTERS.values() if b is not in_aggregator])
def test_after_an_error_about_nan_training_goes_on_as_after_a_step_that_is_skipped(
    transport: Transport, build: Any
) -> None:
    """`dgc.aggregate` always raises: tests/lowrank/test_powersgd.py."""
    skips, raises = build(transport), build(transport, nonfinite="raise")
    for number in range(4):
        with pytest.raises(NonFiniteGradientError) if number == 2 else nullcontext():
            raises.spoilt(number, number == 2)
        skips.spoilt(number, number == 2)
        assert all(map(torch.equal, skips.weights(), raises.weights()))
    assert raises.owner.dropped_steps == 1
    assert_equal(skips.state(), raises.state())


@pytest.mark.parametrize("build", [in_ddp, in_fsdp, in_quantized_fsdp, in_aggregator])
def test_an_exchange_may_be_collected_during_a_step_of_an_optimizer(transport: Transport, build: Any) -> None:
    """It observes the steps of all optimizers, and torch iterates over what does."""
    left = [build(transport)]

    def collect(*_: Any) -> None:
        left.clear()
        gc.collect()

    handles = [register_optimizer_step_pre_hook(collect), register_optimizer_step_post_hook(collect)]
    later = build(transport)
    later.backward(0)
    later.step()
    for handle in handles:
        handle.remove()


BAD = {1, 2, 4}
WITH_A_POLICY = {name: build for name, build in ADAPTERS.items() if build is not in_aggregator}
with_a_policy = pytest.mark.parametrize("build", WITH_A_POLICY.values(), ids=WITH_A_POLICY)


def warned_while_trained_with_nan(trained: Trained) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(6):
            trained.spoilt(number, number in BAD)
    return [str(warning.message) for warning in caught]


@with_a_policy
def test_only_the_first_dropped_step_is_warned_of(transport: Transport, build: Any) -> None:
    messages = warned_while_trained_with_nan(build(transport))
    assert len([message for message in messages if "Further dropped steps are only counted" in message]) == 1


@with_a_policy
def test_dropped_steps_are_counted(transport: Transport, build: Any) -> None:
    trained = build(transport)
    warned_while_trained_with_nan(trained)
    assert trained.owner.dropped_steps == len(BAD)


def raised_while_trained_with_nan(trained: Trained) -> list[int]:
    raised = []
    for number in range(6):
        try:
            trained.spoilt(number, number in BAD)
        except NonFiniteGradientError:
            raised.append(number)
    return raised


def raising(build: Any, transport: Transport) -> Any:
    return build(transport) if build is in_aggregator else build(transport, nonfinite="raise")


@every_adapter
def test_every_dropped_step_raises_an_error_if_asked_for(transport: Transport, build: Any) -> None:
    assert raised_while_trained_with_nan(raising(build, transport)) == sorted(BAD)


@every_adapter
def test_dropped_steps_that_raise_are_counted(transport: Transport, build: Any) -> None:
    trained = raising(build, transport)
    raised_while_trained_with_nan(trained)
    assert trained.owner.dropped_steps == len(BAD)


@pytest.mark.parametrize("build", [in_optimizer, in_ddp, in_fsdp, in_quantized_fsdp])
def test_a_dropped_step_leaves_the_weights_as_they_were(transport: Transport, build: Any) -> None:
    trained = build(transport, nonfinite="raise")
    for number in range(2):
        trained.spoilt(number, False)
    before = trained.weights()
    with pytest.raises(NonFiniteGradientError):
        trained.spoilt(2, True)
    assert all(map(torch.equal, trained.weights(), before))


@with_a_policy
def test_a_warning_that_is_an_error_changes_nothing_of_a_dropped_step(transport: Transport, build: Any) -> None:
    own, other = build(transport), build(transport)
    for number in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other.spoilt(number, number == 1)
        with warnings.catch_warnings(), pytest.raises(UserWarning) if number == 1 else nullcontext():
            warnings.filterwarnings("error", message=".*Further dropped steps are only counted")
            own.spoilt(number, number == 1)
        assert all(map(torch.equal, own.weights(), other.weights())), number
    assert_equal(own.state(), other.state())


@pytest.mark.parametrize("build", [in_ddp, in_fsdp, in_quantized_fsdp])
def test_a_state_is_refused_until_all_optimizers_of_the_model_have_stepped(
    transport: Transport, build: Any
) -> None:
    trained = build(transport)
    first, second = (torch.optim.SGD([p], lr=0.1) for p in trained.model.parameters())
    for number in range(3):
        trained.backward(number)
        first.step()
        if number == 2:
            with pytest.raises(RuntimeError, match=TOO_EARLY):
                trained.state()
        second.step()
        trained.state()


@pytest.mark.parametrize("build", [in_ddp, in_fsdp])
def test_a_state_is_taken_after_the_step_of_an_optimizer_that_replaces_another(
    transport: Transport, build: Any
) -> None:
    trained = build(transport)
    for number in range(4):
        if number == 2:
            trained.optimizer = sgd(trained.model)
        trained.backward(number)
        trained.optimizer.step()
        trained.state()
