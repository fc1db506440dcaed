"""A small model, its data, and N ranks that train it."""

import copy
import io
import threading
from typing import Any

import pytest
import torch
from on_ranks import as_test
from torch import nn

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DenseCompressor, DGCCompressor
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer

BATCH = 4
SIZES = [1, 2, 3]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.spare = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Any, spare: bool = True) -> Any:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.spare(x)) if spare else x)


_lock = threading.Lock()


def net(seed: int = 0) -> Any:
    # simulated ranks are threads of one process, with one random generator
    with _lock, torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def data(step: Any, rank: int = 0) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 3, generator=generator)


def loss_of(model: Any, step: Any, rank: int = 0, **options: Any) -> Any:
    x, y = data(step, rank)
    return (model(x, **options) - y).square().mean()


def joint_loss(model: Any, step: Any, size: Any, **options: Any) -> Any:
    return sum(loss_of(model, step, rank, **options) for rank in range(size)) / size


def momentum_sgd(model: Any, **options: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def wrap(model: Any, transport: Any, make: Any = momentum_sgd, **options: Any) -> Any:
    return DistributedOptimizer(make(model), model.named_parameters(), transport=transport, **options)


def train(model: Any, optimizer: Any, steps: Any, rank: int = 0, *, loss: Any = loss_of, **options: Any) -> None:
    """Train with `loss(model, number of the batch, rank, **options)`, `passes` batches in a step.

    zero: a key of `ZEROS`, or a function of the model and the optimizer. finish: in place of `optimizer.step()`.
    """
    passes, zero, finish = options.pop("passes", 1), options.pop("zero", "own"), options.pop("finish", None)
    for step in steps:
        ZEROS.get(zero, zero)(model, optimizer)
        for part in range(passes):
            loss(model, passes * step + part, rank, **options).backward()
        finish(model, optimizer) if finish else optimizer.step()


def through_gradients(model: Any, optimizer: Any, change: Any = None) -> None:
    optimizer.synchronize()
    if change:
        change(model)
    with optimizer.skip_synchronize():
        optimizer.step()


def clip(model: Any, norm: float = 0.05) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), norm)


def values(model: Any) -> Any:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(a: Any, b: Any, *, exactly: bool = False) -> None:
    rtol, atol = (0.0, 0.0) if exactly else (1e-5, 1e-6)
    torch.testing.assert_close(values(a), values(b), rtol=rtol, atol=atol)


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def run(size: Any, body: Any, models: Any = None) -> Any:
    """Run `body(model, transport)` on every rank, check that the models are equal bit for bit, and return them.
    size: the number of ranks, or a pair of it and of the number of a machine's ranks.
    """
    world = LockstepWorld(size) if isinstance(size, int) else LockstepWorld(*size)
    models = models or [net() for _ in range(world.size)]
    world.run(lambda t: body(models[t.rank], t))
    for model in models[1:]:
        assert_same(model, models[0], exactly=True)
    return models


def each_rank(size: Any, models: Any = None) -> Any:
    """A decorator of a test `body(model, transport, ...)`, which `run` runs. models: returns them."""
    return lambda body: as_test(body, lambda one: run(size, one, models and models()), 2)


def trained(
    size: Any, steps: Any, make: Any = momentum_sgd, compression: Any = None, models: Any = None, **options: Any
) -> Any:
    """The model that `size` ranks have trained. compression: returns one rank's. options: of the optimizer;
    `training` has the arguments of `train`.
    """
    training = options.pop("training", {})
    options.setdefault("backward_passes_per_step", training.get("passes", 1))

    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, make, compression=compression and compression(), **options)
        train(model, optimizer, steps, transport.rank, **training)

    return run(size, body, models)[0]


def trained_alone(size: int, steps: Any, make: Any = momentum_sgd, model: Any = None, **training: Any) -> Any:
    model = model or net()
    train(model, make(model), steps, size, **{"loss": joint_loss, **training})
    return model


def through_a_file(state: Any, weights_only: bool = True) -> Any:
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def check_that_a_saved_state_goes_on(wrapped: Any, saved: int, used: int = 0, again: Any = None) -> None:
    """Train, save after `saved` steps, load into optimizers that made `used` steps, and train both on.
    wrapped: `wrapped(model, transport)` returns the optimizer. again: that which loads, if it differs.
    """

    def body(model: Any, transport: Any) -> None:
        optimizer = wrapped(model, transport)
        train(model, optimizer, range(saved), transport.rank)
        other = copy.deepcopy(model)
        states = [model.state_dict(), optimizer.state_dict(), optimizer.compression_state_dict()]
        weights, state, errors = through_a_file(states)
        resumed = (again or wrapped)(other, transport)
        train(other, resumed, range(90, 90 + used), transport.rank)  # what it has kept must not stay
        other.load_state_dict(weights)
        resumed.load_state_dict(state)
        resumed.load_compression_state_dict(errors)
        for one, own in ((other, resumed), (model, optimizer)):
            train(one, own, range(saved, saved + 5), transport.rank)
        assert same(values(model).values(), values(other).values())

    run(2, body)


def alone() -> Any:
    return LockstepWorld(1).transports[0]


def dgc(ratio: float = 0.1, momentum: float = 0.9, nesterov: bool = False, **options: Any) -> Any:
    return DGCCompressor(ratio, DGCSGDMemory(momentum, nesterov), **options)


def dgc_sgd(model: Any, **options: Any) -> Any:
    return DGCSGD(model.parameters(), lr=0.1, momentum=0.9, **options)


class Half:
    compress = staticmethod(lambda tensor: (tensor.half(), tensor.dtype))
    decompress = staticmethod(lambda tensor, dtype: tensor.to(dtype))


# ways to zero gradients
ZEROS = {
    "own": lambda model, optimizer: optimizer.zero_grad(),
    "none": lambda model, optimizer: optimizer.zero_grad(set_to_none=True),
    "zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "inner": lambda model, optimizer: optimizer.inner.zero_grad(),
}

KINDS = {"dense": DenseCompressor, "dgc": lambda: dgc(0.2), "dgc dense": lambda: dgc(1.0)}
every_kind = pytest.mark.parametrize("compression", KINDS.values(), ids=KINDS)
