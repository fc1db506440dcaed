"""What dgc.fsdp refuses, on one machine of one rank, in this process."""

import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from parallel import sharded
from parallel.sharded import batches, loss_of, top_k, train
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy

from dgc.comm.lockstep import LockstepWorld
from dgc.comm.transport import Transport
from dgc.compression import DGCAdamCompressor, DGCCompressor, OneBitAdamCompressor
from dgc.fsdp import ShardedLocalOptimizer, compress, local_mesh
from dgc.local import OuterSteps
from dgc.memory import ResidualMemory
from dgc.optim import DistributedOptimizer, LocalOptimizer

pytestmark = pytest.mark.usefixtures("no_type_checks")
INPUTS = batches(2, 0)
Act = Callable[..., Any]


def network(*frozen: int) -> nn.Sequential:
    model = sharded.network()
    for layer in frozen:
        model[layer].requires_grad_(False)
    return model


def shard(transport: Transport, model: Any = None, **options: Any) -> Any:
    return sharded.shard(model or network(), local_mesh(transport), **options)


@pytest.fixture
def model(transport: Transport) -> Any:
    return shard(transport)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def outer(transport: Transport, model: nn.Module, /, **options: Any) -> ShardedLocalOptimizer:
    arguments = {"optimizer": sgd(model), "model": model, "method": OuterSteps(2), "transport": transport}
    return ShardedLocalOptimizer(**{**arguments, **options})


def refused(message: str, act: Act, *arguments: Any, kind: type[Exception] = ValueError, **options: Any) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}"):
        act(*arguments, **options)


def test_arguments_are_named(transport: Transport, model: Any) -> None:
    compressor, scaler = top_k(), torch.amp.GradScaler
    half = shard(transport, network().half(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    connected = "transport must be what dgc.comm connects"
    on_which = "model must be a torch.nn.Module on which fully"

    def attempt(message: str, model: Any = model, **options: Any) -> None:
        refused(message, compress, model, compressor, **{"transport": transport, **options})

    attempt(f"{on_which}_shard was called, not None", None)
    attempt(f"{on_which}_shard was called, not <class", nn.Linear)
    attempt("the mesh of module 2 has no replicas, between which gradients would be exchanged", transport=None)
    attempt(f"{connected}, with hierarchical=True, not 'x'", transport="x")
    attempt("transport has 2 ranks, and torch.distributed has 1", transport=LockstepWorld(2).transports[0])
    attempt("steps_per_epoch must be None or a positive int, not '3'", steps_per_epoch="3")
    attempt("grad_scaler must be a torch.amp.GradScaler or None, not <class", grad_scaler=scaler)
    attempt("grad_scaler cannot unscale gradients of fp16", half, grad_scaler=scaler("cpu"))
    refused("device_type must be 'cpu', 'cuda' or another", local_mesh, transport, "gpu")
    refused(connected, local_mesh, None)
    compress(model, compressor, transport=transport).close()  # the compressor is still free
    for of_momentum in (OneBitAdamCompressor(), DGCAdamCompressor(0.1)):
        words = f"{type(of_momentum).__name__} exchanges the momentum of an optimizer, which dgc.fsdp does not"
        refused(words, compress, model, of_momentum, transport=transport)
    refuse = partial(refused, act=partial(outer, transport, model))
    refuse("method must be an algorithm such as dgc.gossip.SGP(), not None", method=None)
    refuse("method must be an algorithm such as dgc.gossip.SGP(), not <class", method=OuterSteps)
    refuse(f"{on_which}_shard was called, not None", model=None)
    refuse(connected, transport=None)
    refuse("optimizer must be a torch.optim.Optimizer, not None", optimizer=None)
    refuse("9 of the optimizer's 9 parameters do not belong to", optimizer=sgd(shard(transport)))


def test_a_forward_pass_before(transport: Transport) -> None:
    """The outermost module has gathered parameters then."""
    models = [shard(transport) for _ in range(4)]
    optimizers = [sgd(model) for model in models]
    models[1].unshard()
    loss_of(models[2], INPUTS[0])
    loss_of(models[3], INPUTS[0])
    for model, optimizer in zip(models[:3], optimizers, strict=False):
        exchange = compress(model, top_k(), transport=transport)
        train(model, optimizer, INPUTS)
        exchange.close()
        for p, q in zip(model.parameters(), models[0].parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q.full_tensor())
    train(models[3], outer(transport, models[3], optimizer=optimizers[3]), INPUTS)


def test_a_second_exchange(transport: Transport) -> None:
    compressed, in_outer_steps, with_hook = (shard(transport) for _ in range(3))
    exchange = compress(compressed, top_k(), transport=transport)
    optimizer = outer(transport, in_outer_steps)
    for again, owner in ((compressed, "FSDPExchange"), (in_outer_steps, "ShardedLocalOptimizer")):
        message = f"the model has a {owner} already: close() it before another exchange"
        refused(message, compress, again, top_k(), transport=transport)
        refused(message, outer, transport, again)
    with_hook.set_all_reduce_hook(lambda output: None)
    refused("the model has a hook of set_all_reduce_hook already", compress, with_hook, transport=transport)
    message = "0.weight is sharded: ranks have different parts of it, which"
    arguments = sgd(compressed), list(compressed.named_parameters())
    refused(f"{message} DistributedOptimizer", DistributedOptimizer, *arguments, top_k(), transport=transport)
    refused(f"{message} LocalOptimizer", LocalOptimizer, *arguments, OuterSteps(2), transport=transport)
    exchange.close()
    optimizer.close()
    second = compress(compressed, top_k(), transport=transport)
    exchange.close()  # does not remove the hooks of the second one
    train(compressed, sgd(compressed), INPUTS)
    assert second.error_norm() > 0
    compress(in_outer_steps, top_k(), transport=transport)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_parameters_that_fsdp1_has_sharded_are_refused(transport: Transport) -> None:
    for uses_originals in (True, False):
        options: Any = {"use_orig_params": uses_originals, "device_id": torch.device("cpu")}
        model = FullyShardedDataParallel(network(), **options)
        arguments = sgd(model), list(model.named_parameters())
        message = f"{arguments[1][0][0]} belongs to a FullyShardedDataParallel (FSDP1): ranks have different parts"
        refused(message, DistributedOptimizer, *arguments, transport=transport)
        refused(message, LocalOptimizer, *arguments, OuterSteps(2), transport=transport)


def test_gradients_that_machines_would_not_exchange(transport: Transport) -> None:
    """Machines would end with different models, or a frozen parameter would change."""
    alone, thaw = "each replica would train {} alone", partial(nn.Module.requires_grad_, requires_grad=True)
    rows: list[tuple[str, Callable[[Any], Any], tuple[int, ...]]] = [
        ("0.weight of module 0 was frozen", lambda model: model[0].requires_grad_(False), ()),
        *((alone.format(f"{layers[0]}.weight"), thaw, layers) for layers in ((0,), (4, 5))),
        (alone.format("6.weight"), lambda model: model.append(nn.Linear(1, 1)), ()),
        ("the hook of the model was replaced", lambda model: model.set_all_reduce_hook(lambda output: None), ()),
    ]
    for message, change, frozen in rows:
        model = shard(transport, network(*frozen))
        compress(model, top_k(), transport=transport)
        train(model, sgd(model), INPUTS)
        change(model)
        refused(message, train, model, sgd(model), INPUTS, kind=RuntimeError)
    model = shard(transport)
    compress(model[0], top_k(), transport=transport)  # a part of a model is no model
    refused(alone.format("4.weight"), train, model, sgd(model), INPUTS, kind=RuntimeError)


@pytest.mark.filterwarnings("ignore:.* sends an element seldom")
def test_steps_on_scaled_gradients(transport: Transport, model: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    compress(model, top_k(), transport=transport, grad_scaler=scaler)
    for optimizer in (sgd(model), torch.optim.AdamW(model.parameters(), fused=True)):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, INPUTS[0])).backward()
        refused("the gradients are scaled: call grad_scaler.step", optimizer.step, kind=RuntimeError)
        scaler.step(optimizer)
        scaler.update()


def test_parameters_that_outer_steps_would_not_find(transport: Transport, model: Any) -> None:
    optimizer = outer(transport, model)
    train(model, optimizer, INPUTS)
    model.load_state_dict(deepcopy(model.state_dict()), assign=True)
    with pytest.raises(RuntimeError, match=r"were replaced after dgc.fsdp.ShardedLocalOptimizer, for example"):
        train(model, optimizer, INPUTS)


def test_damaged_states(transport: Transport, model: Any) -> None:
    compression = DGCCompressor(0.2, ResidualMemory(), warmup_epochs=2)
    exchange = compress(model, compression, transport=transport, steps_per_epoch=2)
    state: Any = exchange.compression_state_dict()
    for epochs in ("1", -1, float("nan"), float("inf"), [1], torch.ones(2)):
        refused("epochs of the state must be ", exchange.load_compression_state_dict, {**state, "epochs": epochs})
    exchange.close()
    optimizer = outer(transport, model, optimizer=torch.optim.AdamW(model.parameters()))
    train(model, optimizer, INPUTS)
    state = deepcopy(optimizer.compression_state_dict())
    state["optimizer"]["state"][0]["exp_avg"] = torch.ones(3)
    message = "exp_avg of a parameter of shape (5, 7) has shape (3,), and this"
    refused(message, optimizer.load_compression_state_dict, state)
