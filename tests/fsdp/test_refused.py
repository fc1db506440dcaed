"""What dgc.fsdp refuses, on one machine of one rank, in this process."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dgc.comm.lockstep import LockstepWorld
from dgc.comm.transport import Transport
from dgc.compression import DGCAdamCompressor, DGCCompressor, OneBitAdamCompressor, SparseCompressor
from dgc.fsdp import ShardedLocalOptimizer, compress, local_mesh
from dgc.local import OuterSteps
from dgc.memory import ResidualMemory
from dgc.optim import DistributedOptimizer, LocalOptimizer

pytestmark = pytest.mark.usefixtures("no_type_checks")
SIZE = 8
Act = Callable[[], Any]


def network(frozen: tuple[int, ...] = ()) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(3)))
    for i in frozen:
        model[i].requires_grad_(False)
    return model


def shard(transport: Transport, model: nn.Sequential, **options: Any) -> Any:
    """Layers 0 and 1 are groups of their own, layer 2 is in that of the whole model."""
    mesh = local_mesh(transport)
    for i in range(2):
        fully_shard(model[i], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def top_k() -> SparseCompressor:
    return SparseCompressor(0.2, ResidualMemory())


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(2, SIZE)).square().mean()
    return loss


def train(model: nn.Module, optimizer: Any, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def refused(cases: dict[str, Act], kind: type[Exception] = ValueError) -> None:
    """Each case raises an error of this kind that begins with the case's text."""
    for message, act in cases.items():
        try:
            act()
        except kind as error:
            assert str(error).startswith(message), (message, str(error))
        else:
            raise AssertionError(f"not refused: {message}")


def test_arguments_are_named(transport: Transport) -> None:
    model, compressor = shard(transport, network()), top_k()
    half = shard(transport, network().half(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    scaler: Any = torch.amp.GradScaler
    other = LockstepWorld(2).transports[0]

    def attempt(model: Any = model, **options: Any) -> Act:
        return lambda: compress(model, compressor, **{"transport": transport, **options})

    refused(
        {
            "model must be a torch.nn.Module on which fully_shard was called, not None": attempt(None),
            "model must be a torch.nn.Module on which fully_shard was called, not <class": attempt(nn.Linear),
            "transport must be what dgc.comm connects, with hierarchical=True, not None": attempt(transport=None),
            "transport must be what dgc.comm connects, with hierarchical=True, not 'x'": attempt(transport="x"),
            "transport has 2 ranks, and torch.distributed has 1": attempt(transport=other),
            "steps_per_epoch must be None or a positive int, not '3'": attempt(steps_per_epoch="3"),
            "grad_scaler must be a torch.amp.GradScaler or None, not <class": attempt(grad_scaler=scaler),
            "grad_scaler cannot unscale gradients of fp16": attempt(half, grad_scaler=scaler("cpu")),
            "device_type must be 'cpu', 'cuda' or another": lambda: local_mesh(transport, "gpu"),
            "transport must be what dgc.comm connects": lambda: local_mesh(None),  # type: ignore[arg-type]
        }
    )
    compress(model, compressor, transport=transport).close()  # the compressor is still free


def test_arguments_of_outer_steps_are_named(transport: Transport) -> None:
    model, other = shard(transport, network()), shard(transport, network())

    def attempt(**options: Any) -> Act:
        arguments = {"optimizer": sgd(model), "model": model, "method": OuterSteps(2), "transport": transport}
        return lambda: ShardedLocalOptimizer(**{**arguments, **options})

    refused(
        {
            "method must be an algorithm such as dgc.gossip.SGP(), not None": attempt(method=None),
            "method must be an algorithm such as dgc.gossip.SGP(), not <class": attempt(method=OuterSteps),
            "model must be a torch.nn.Module on which fully_shard was called, not None": attempt(model=None),
            "transport must be what dgc.comm connects": attempt(transport=None),
            "optimizer must be a torch.optim.Optimizer, not None": attempt(optimizer=None),
            "6 of the optimizer's 6 parameters are not those of the sharded model": attempt(optimizer=sgd(other)),
        }
    )


def test_compressors_of_momentum(transport: Transport) -> None:
    model = shard(transport, network())
    for compressor in (OneBitAdamCompressor(), DGCAdamCompressor(0.1)):
        with pytest.raises(ValueError, match="exchanges the momentum of an optimizer, which dgc.fsdp does not"):
            compress(model, compressor, transport=transport)


def test_a_forward_pass_before(transport: Transport) -> None:
    """The outermost module has gathered parameters then."""
    models = [shard(transport, network()) for _ in range(4)]
    for model in models[:3]:
        optimizer = sgd(model)
        if model is models[1]:
            model.unshard()
        elif model is models[2]:
            loss_of(model)
        exchange = compress(model, top_k(), transport=transport)
        train(model, optimizer)
        exchange.close()
        for p, q in zip(model.parameters(), models[0].parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q.full_tensor())
    optimizer = sgd(models[3])
    loss_of(models[3])
    train(models[3], ShardedLocalOptimizer(optimizer, models[3], OuterSteps(2), transport=transport))


def test_a_second_exchange(transport: Transport) -> None:
    compressed, outer, with_hook = (shard(transport, network()) for _ in range(3))
    exchange = compress(compressed, top_k(), transport=transport)
    optimizer = ShardedLocalOptimizer(sgd(outer), outer, OuterSteps(2), transport=transport)
    with_hook.set_all_reduce_hook(lambda output: None)

    def wrap(model: Any) -> Act:
        return lambda: ShardedLocalOptimizer(sgd(model), model, OuterSteps(2), transport=transport)

    for again, owner in ((compressed, "FSDPExchange"), (outer, "ShardedLocalOptimizer")):
        message = f"the model has a {owner} already: close() it before another exchange"
        refused({message: partial(compress, again, top_k(), transport=transport)})
        refused({message: wrap(again)})
    named = list(compressed.named_parameters())
    unsharded: dict[str, Act] = {
        "the model has a hook of set_all_reduce_hook already": lambda: compress(with_hook, transport=transport),
        "0.weight is sharded: ranks have different parts of it, which DistributedOptimizer": lambda: (
            DistributedOptimizer(sgd(compressed), named, top_k(), transport=transport)
        ),
        "0.weight is sharded: ranks have different parts of it, which LocalOptimizer": lambda: LocalOptimizer(
            sgd(compressed), named, OuterSteps(2), transport=transport
        ),
    }
    refused(unsharded)
    exchange.close()
    optimizer.close()
    second = compress(compressed, top_k(), transport=transport)
    exchange.close()  # does not remove the hooks of the second one
    train(compressed, sgd(compressed))
    assert second.error_norm() > 0
    compress(outer, top_k(), transport=transport)


def test_gradients_that_machines_would_not_exchange(transport: Transport) -> None:
    """Machines would end with different models, or a frozen parameter would change."""

    def after(change: Callable[[Any], Any], frozen: tuple[int, ...] = (), part: Any = slice(None)) -> Act:
        def act() -> None:
            model = shard(transport, network(frozen))
            compressed = model if part == slice(None) else model[part]
            exchange = compress(compressed, top_k(), transport=transport)
            try:
                if compressed is model:
                    train(model, sgd(model))
                change(model)
                train(model, sgd(model))
            finally:
                exchange.close()

        return act

    unfreeze = lambda model: model.requires_grad_(True)  # noqa: E731
    replaced = lambda model: model.set_all_reduce_hook(lambda output: None)  # noqa: E731
    refused({"0.weight of module 0 was frozen": after(lambda model: model[0].requires_grad_(False))}, RuntimeError)
    refused({"each machine would train 0.weight alone": after(unfreeze, (0,))}, RuntimeError)
    refused({"each machine would train 2.weight alone": after(unfreeze, (2,))}, RuntimeError)
    refused({"each machine would train 2.weight alone": after(lambda model: None, part=0)}, RuntimeError)
    added = after(lambda model: model.append(nn.Linear(SIZE, 1)))
    refused({"each machine would train 3.weight alone": added}, RuntimeError)
    refused({"the hook of the model was replaced": after(replaced)}, RuntimeError)


def test_steps_on_scaled_gradients(transport: Transport) -> None:
    model = shard(transport, network())
    scaler = torch.amp.GradScaler("cpu")
    compress(model, top_k(), transport=transport, grad_scaler=scaler)
    for optimizer in (sgd(model), torch.optim.AdamW(model.parameters(), fused=True)):
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        with pytest.raises(RuntimeError, match="the gradients are scaled: call grad_scaler.step"):
            optimizer.step()
        scaler.step(optimizer)
        scaler.update()


def test_parameters_that_outer_steps_would_not_find(transport: Transport) -> None:
    model = shard(transport, network())
    optimizer = ShardedLocalOptimizer(sgd(model), model, OuterSteps(2), transport=transport)
    train(model, optimizer)
    model.load_state_dict(deepcopy(model.state_dict()), assign=True)
    with pytest.raises(RuntimeError, match=r"were replaced after dgc.fsdp.ShardedLocalOptimizer, for example"):
        train(model, optimizer)


def test_optimizer_state_of_another_shape(transport: Transport) -> None:
    model = shard(transport, network())
    adam = torch.optim.AdamW(model.parameters())
    optimizer = ShardedLocalOptimizer(adam, model, OuterSteps(2), transport=transport)
    train(model, optimizer)
    state = deepcopy(optimizer.compression_state_dict())
    state["optimizer"]["state"][0]["exp_avg"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"^exp_avg of a parameter of shape \(8, 8\) has shape \(3,\), and this"):
        optimizer.load_compression_state_dict(state)


def test_damaged_epochs(transport: Transport) -> None:
    model = shard(transport, network())
    compression = DGCCompressor(0.2, ResidualMemory(), warmup_epochs=2)
    exchange = compress(model, compression, transport=transport, steps_per_epoch=2)
    state = exchange.compression_state_dict()
    for epochs in ("1", -1, float("nan"), float("inf"), [1], torch.ones(2)):
        with pytest.raises(ValueError, match="^epochs of the state must be "):
            exchange.load_compression_state_dict({**state, "epochs": epochs})
