"""A compressor has settings only: any number of optimizers, exchanges and simulated ranks use one object."""

import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from optim import nets
from torch import Tensor

from dgc import compression as methods
from dgc.comm.lockstep import LockstepWorld
from dgc.engine.agreement import describe
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import DGCSGD, DGCAdam, OneBitAdam

pytestmark = pytest.mark.usefixtures("no_type_checks")

WARM: dict[str, Any] = {"warmup_epochs": 3, "warmup_coeff": [0.5, 0.3, 0.2]}


def of_momentum(momentum: float, nesterov: bool = False) -> Callable[[Any], Any]:
    return lambda model: DGCSGD(model.parameters(), lr=0.1, momentum=momentum, nesterov=nesterov)


def of_adam(kind: Any, beta1: float, freeze_step: int) -> Callable[[Any], Any]:
    return lambda model: kind(model.parameters(), lr=0.01, betas=(beta1, 0.95), freeze_step=freeze_step)


def of_sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# a compressor, and two optimizers of different momentum
CASES: dict[str, tuple[Callable[[], Any], Sequence[Callable[[Any], Any]]]] = {
    "DGC": (lambda: methods.DGCCompressor(0.1, **WARM), (of_momentum(0.9), of_momentum(0.6, nesterov=True))),
    "chunks": (
        lambda: methods.ChunkCompressor(0.1, "dgc", 16, **WARM),
        (of_momentum(0.9), of_momentum(0.6, nesterov=True)),
    ),
    "a route": (
        lambda: methods.Route([methods.Rule(methods.DGCCompressor(0.1, vectors="sparse", **WARM))]),
        (of_momentum(0.9), of_momentum(0.6)),
    ),
    "EF21": (
        lambda: methods.EF21Compressor(methods.DGCCompressor(0.1, ResidualMemory(), **WARM)),
        (of_sgd, of_sgd),
    ),
    "1-bit Adam": (methods.OneBitAdamCompressor, (of_adam(OneBitAdam, 0.9, 2), of_adam(OneBitAdam, 0.6, 5))),
    "DGC for Adam": (
        lambda: methods.DGCAdamCompressor(0.1, **WARM),
        (of_adam(DGCAdam, 0.9, 2), of_adam(DGCAdam, 0.6, 5)),
    ),
}


def two_runs(transport: Any, makers: Sequence[Any], compressions: Sequence[Any]) -> list[list[Any]]:
    """The weights and ratios of two optimizers that take turns, the second one an epoch ahead."""
    models = [nets.net(seed) for seed in range(2)]
    made = zip(models, makers, compressions, strict=True)
    optimizers = [nets.wrap(model, transport, make, compression=c, bucket_mb=2e-4) for model, make, c in made]
    ends: list[list[Any]] = []
    for step in range(8):
        for ahead, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if step % 2 == 0:
                optimizer.begin_epoch(step // 2 + ahead)
            nets.train(model, optimizer, [step], transport.rank)
            ends.append([optimizer.compress_ratio, *nets.values(model).values(), *optimizer.errors()])
    return ends


@pytest.mark.parametrize(("make", "makers"), CASES.values(), ids=CASES)
def test_one_object_in_two_optimizers_does_what_two_objects_do(make: Any, makers: Any) -> None:
    shared = make()  # also by all simulated ranks

    def body(transport: Any) -> None:
        expected = two_runs(transport, makers, [make(), make()])
        found = two_runs(transport, makers, [shared, shared])
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

    LockstepWorld(2).run(body)


@pytest.mark.parametrize(("make", "makers"), CASES.values(), ids=CASES)
def test_a_compressor_is_not_changed_by_its_use(make: Any, makers: Any) -> None:
    given = make()
    before = copy.copy(vars(given)), describe(given=given)
    two_runs(nets.alone(), makers, [given, given])
    assert (vars(given), describe(given=given)) == before


def test_a_memory_serves_two_compressors_with_different_momentum() -> None:
    memory = DGCSGDMemory()
    two = [methods.DGCCompressor(ratio, memory, warmup_epochs=3) for ratio in (0.1, 0.2)]
    separate = [methods.DGCCompressor(ratio, DGCSGDMemory(), warmup_epochs=3) for ratio in (0.1, 0.2)]
    makers = (of_momentum(0.9), of_momentum(0.6))
    found, expected = (two_runs(nets.alone(), makers, compressions) for compressions in (two, separate))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert memory.momentum is None


# --- the interface of the original work -----------------------------------------------------------------


def warm(compression: Any, **options: Any) -> tuple[Any, Any]:
    model = nets.net()
    return model, nets.wrap(model, nets.alone(), of_momentum(0.9), compression=compression, **options)


def test_an_epoch_that_begins_in_the_compressor_begins_in_all_its_exchanges() -> None:
    compression = methods.DGCCompressor(0.1, **WARM)
    optimizers = [warm(compression)[1] for _ in range(2)]
    for epoch, ratio in enumerate([0.5, 0.3, 0.2, 0.1]):
        compression.warmup_compress_ratio(epoch)
        assert [optimizer.compress_ratio for optimizer in optimizers] == [ratio, ratio], epoch
        assert compression.compress_ratio == ratio, epoch


def test_an_epoch_that_begins_in_the_compressor_has_the_bits_of_one_that_begins_in_the_optimizer() -> None:
    def ends(begins_in_optimizer: bool) -> list[Tensor]:
        compression = methods.DGCCompressor(0.1, **WARM)
        model, optimizer = warm(compression)
        for epoch in range(4):
            (optimizer if begins_in_optimizer else compression).begin_epoch(epoch)
            nets.train(model, optimizer, range(2 * epoch, 2 * epoch + 2))
        return list(nets.values(model).values())

    assert nets.same(ends(begins_in_optimizer=True), ends(begins_in_optimizer=False))


def test_an_epoch_begins_in_the_compressor_inside_of_another_one() -> None:
    inner = methods.DGCCompressor(0.1, ResidualMemory(), **WARM)
    model = nets.net()
    optimizer = nets.wrap(model, nets.alone(), of_sgd, compression=methods.EF21Compressor(inner))
    inner.warmup_compress_ratio(1)
    assert optimizer.compress_ratio == inner.compress_ratio == 0.3


def test_an_exchange_that_is_built_later_begins_in_the_epoch_of_the_compressor() -> None:
    compression = methods.DGCCompressor(0.1, **WARM)
    compression.warmup_compress_ratio(2)
    assert compression.compress_ratio == 0.2
    assert warm(compression)[1].compress_ratio == 0.2


def test_the_ratio_of_a_compressor_is_that_of_its_exchange() -> None:
    compression = methods.DGCCompressor(0.1, **WARM)
    _, optimizer = warm(compression)
    optimizer.begin_epoch(1)
    assert compression.compress_ratio == 0.3


def test_the_ratio_of_a_compressor_in_several_exchanges_is_the_smallest() -> None:
    compression = methods.DGCCompressor(0.1, **WARM)
    optimizers = [warm(compression)[1] for _ in range(2)]
    optimizers[1].begin_epoch(2)
    assert [o.compress_ratio for o in optimizers] == [0.5, 0.2] and compression.compress_ratio == 0.2


def test_a_compressor_does_not_keep_its_exchanges() -> None:
    compression = methods.DGCCompressor(0.1, **WARM)
    made = warm(compression)
    made[1].begin_epoch(3)
    made[1].close()
    del made
    gc.collect()
    assert compression.compress_ratio == 0.5


def test_a_copy_of_a_compressor_has_exchanges_of_its_own() -> None:
    compression = methods.DGCCompressor(0.1, **WARM)
    _, optimizer = warm(compression)
    copy.deepcopy(compression).warmup_compress_ratio(3)
    assert optimizer.compress_ratio == 0.5
