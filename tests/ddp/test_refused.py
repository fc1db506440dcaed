"""What dgc.ddp refuses, and the momentum of 1-bit Adam and DGC for Adam that a hook exchanges, in one process."""

import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from optim import nets, wrappers
from optim.nets import alone, dgc, dgc_sgd
from refusals import check_refusals, refuse
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim import SGD

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DenseCompressor, DGCAdamCompressor, DGCCompressor, OneBitAdamCompressor
from dgc.ddp import compress
from dgc.memory import ResidualMemory
from dgc.optim import DGCSGD, DGCAdam, DistributedOptimizer, OneBitAdam


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def sgd(model: nn.Module, **options: Any) -> SGD:
    return SGD(model.parameters(), lr=0.1, **options)


def wrapped(module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module or net(), **options)


def hook(model: Any, compression: Any = None, optimizer: Any = None, **options: Any) -> Any:
    return compress(model, compression or DenseCompressor(), optimizer, **{"transport": alone(), **options})


momentum = partial(dgc, 0.5)


def after(act: Callable[[Any], Any]) -> DistributedDataParallel:
    model = wrapped()
    act(model)
    return model


def with_python_reducer() -> DistributedDataParallel:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return wrapped()


def with_delayed_parameters() -> DistributedDataParallel:
    module = net()
    first, *_, (_, last) = module.named_parameters()
    return wrapped(module, delay_all_reduce_named_params=[first], param_to_hook_all_reduce=last)


class Fabric(nn.Module):
    """As Lightning's _FabricModule: it has all names of the module inside."""

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__()
        self._forward_module = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._forward_module.module, name)


def one_bit(model: nn.Module) -> OneBitAdam:
    return OneBitAdam(model.parameters(), lr=0.01, freeze_step=2)


def momentum_of_lookahead() -> None:
    model = wrapped()
    hook(model, momentum(), wrappers.Lookahead(dgc_sgd(model)))


def in_an_optimizer(model: Any) -> DistributedOptimizer:
    return DistributedOptimizer(sgd(model), model.module.named_parameters(), transport=alone())


def with_optimizer_in_backward() -> DistributedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        from torch.distributed.optim import _apply_optimizer_in_backward
    module = net()
    _apply_optimizer_in_backward(SGD, module.parameters(), {"lr": 0.1})
    return wrapped(module)


@pytest.mark.usefixtures("no_type_checks")
def test_a_model_that_a_hook_cannot_serve() -> None:
    half = _MixedPrecision(param_dtype=torch.bfloat16)  # DDP itself accepts it on a GPU only
    changes = "mixed_precision= changes the type of the buckets: use torch.autocast"
    sparse = nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4))
    rows: list[tuple[Any, str]] = [
        (net(), "compress needs a model in DistributedDataParallel, not Sequential: wrap it first"),
        (after(lambda model: model.register_comm_hook(None, allreduce_hook)), "has a communication hook already"),
        (after(hook), "it has a communication hook already"),
        (after(in_an_optimizer), "belongs to another DistributedOptimizer already"),
        (with_python_reducer(), "torch.compile's python_reducer calls no hooks"),
        (with_delayed_parameters(), "delay_all_reduce_named_params bypasses the hook"),
        (after(lambda model: setattr(model, "mixed_precision", half)), changes),
        (wrapped(wrapped()), "it is around another one, and both would average the gradients"),
        (wrapped(sparse), "0 has sparse gradients, .*: set sparse=False"),
        (with_optimizer_in_backward(), "an optimizer steps 0.weight, 0.bias, 1.weight during backward"),
    ]
    if torch.__version__ >= "2.13":  # the argument is new there
        unused = wrapped(skip_all_reduce_unused_params=True, find_unused_parameters=True)
        rows.append((unused, "skip_all_reduce_unused_params leaves out buckets"))
    check_refusals(*((partial(hook, model), message) for model, message in rows))


def test_a_ddp_that_is_built_around_a_compressed_one() -> None:
    model = wrapped()
    hook(model)
    around = wrapped(model)
    with pytest.raises(RuntimeError, match="another DistributedDataParallel is around the one that is compressed"):
        around(torch.ones(1, 8)).sum().backward()


def test_a_ddp_in_place_of_another_one_that_still_exists() -> None:
    """It is used no more."""
    before = wrapped()
    hook(before)
    model = wrapped(before.module)
    hook(model)
    model(torch.ones(1, 8)).sum().backward()
    assert all(p.grad is not None for p in before.parameters())


def test_a_distributed_optimizer_of_compressed_parameters() -> None:
    model = after(hook)
    module = model.module
    refuse("^dgc.ddp.compress exchanges the gradient of 0.weight already", in_an_optimizer, model)
    again = DistributedDataParallel(module)
    hook(again)  # in place of the first one
    del model, again
    gc.collect()
    DistributedOptimizer(sgd(module), module.named_parameters(), transport=alone())


def test_momentum_that_would_be_applied_twice_or_not_at_all() -> None:
    lacks = "applies momentum to 1 parameters that the optimizer lacks, such as 0.weight"
    rows: list[tuple[Any, Any, str]] = [
        (momentum(), lambda model: None, "pass the optimizer to compress"),
        (momentum(), partial(sgd, momentum=0.9), "SGD would apply it again: use dgc.optim.DGCSGD"),
        (momentum(), lambda model: torch.optim.Adam(model.parameters()), "Adam would apply it again"),
        (momentum(), lambda model: DGCSGD(model.parameters(), lr=0.1, momentum=0.5), "they must agree"),
        (momentum(), lambda model: DGCSGD([model.module[1].weight], lr=0.1, momentum=0.9), lacks),
        (OneBitAdamCompressor(), lambda model: None, r"and has none: .*pass it to dgc.ddp.compress"),
        (OneBitAdamCompressor(), lambda m: torch.optim.AdamW(m.parameters()), "AdamW does not share its own"),
    ]
    for compression, optimizer, message in rows:
        model = wrapped()
        refuse(message, hook, model, compression, optimizer(model))
    model = wrapped()
    hook(model, DGCCompressor(0.5, ResidualMemory()), sgd(model, momentum=0.9))
    model = wrapped()
    optimizer = DGCSGD(model.parameters(), lr=0.1, momentum=0.9)
    hook(model, momentum(), optimizer)
    optimizer.param_groups[0]["momentum"] = 0.5
    refuse("it must not change", model(torch.ones(1, 8)).sum().backward)


@pytest.mark.usefixtures("no_type_checks")
def test_arguments() -> None:
    for message, options in (
        ("nonfinite must be 'skip' or 'raise', not 'ignore'", {"nonfinite": "ignore"}),
        ("it needs nonfinite='skip'", {"nonfinite": "raise", "grad_scaler": torch.amp.GradScaler("cpu")}),
        ("bucket_mb must be positive", {"bucket_mb": 0}),
        ("compression=DenseCompressor is a class", {"compression": DenseCompressor}),
        ("process group has 1 ranks, but the exchange has 2", {"transport": LockstepWorld(2).transports[0]}),
    ):
        refuse(message, hook, wrapped(), **options)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("kind", wrappers.KNOWN)
@pytest.mark.parametrize(("make", "compression"), [(dgc_sgd, partial(dgc, 1.0)), (one_bit, OneBitAdamCompressor)])
def test_the_optimizer_inside_a_wrapper_gives_up_its_momentum(make: Any, compression: Any, kind: Any) -> None:
    """And a module around DistributedDataParallel is taken as that."""
    trained = []
    for wraps in (lambda own: own, kind):
        model = DistributedDataParallel(nets.net())
        around = model if kind is wrappers.AcceleratedOptimizer else Fabric(model)
        optimizer = wraps(make(model))
        hook(around, compression(), optimizer)
        for step in range(5):
            optimizer.zero_grad()
            nets.loss_of(model, step).backward()
            optimizer.step()
        trained.append(model.module)
    nets.assert_same(*trained, exactly=True)
    refuse("Lookahead steps another optimizer, DGCSGD, .*: pass that one", momentum_of_lookahead)


METHODS: list[tuple[Any, Any]] = [(OneBitAdam, OneBitAdamCompressor), (DGCAdam, partial(DGCAdamCompressor, 0.2))]


@pytest.mark.parametrize(("make", "compression"), METHODS, ids=["OneBitAdam", "DGCAdam"])
@pytest.mark.filterwarnings("ignore:.*has NaN or inf")
def test_the_hook_exchanges_momentum(make: Any, compression: Any) -> None:
    model, other = nets.net(), nets.net()
    wrapped = DistributedDataParallel(model)
    inner, adam = (make(m.parameters(), lr=0.01, freeze_step=3) for m in (model, other))
    exchange = compress(wrapped, compression(), inner, transport=alone())
    optimizer = DistributedOptimizer(adam, other.named_parameters(), compression(), transport=alone())
    for step in range(8):
        factor = float("nan") if step in (1, 5) else 1.0
        for m, o in ((wrapped, inner), (other, optimizer)):
            o.zero_grad()
            (nets.loss_of(m, step) * factor).backward()
            o.step()
        assert exchange.dropped_steps == optimizer.dropped_steps
        nets.assert_same(model, other, exactly=True)
    assert inner.exchanges_momentum and inner.param_groups[0]["steps"] == 6
    assert exchange.error_norm() == optimizer.error_norm() > 0
