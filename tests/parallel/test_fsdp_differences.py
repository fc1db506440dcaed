"""Weights of dgc.fsdp.quantize in 4 bits, as differences to those gathered last, on ranks that shard one model."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from parallel import sharded
from parallel.found import digest, refused
from parallel.ranks import each_rank_of, over, torchrun
from parallel.sharded import batches, build, kept, loss_of, on_gradient, shard, train, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dgc.core.bucket import local_part
from dgc.fsdp import quantize

on_ranks = each_rank_of(over(torchrun, 3), *(over(torchrun, ranks, pytest.mark.proof) for ranks in (2, 4)))
KINDS = pytest.mark.parametrize("name", ["plain", "bf16", "columns", "frozen", "resharded"])


def gathered(model: Any) -> list[Tensor]:
    """What the modules compute with."""
    found = list[Tensor]()
    for module in (model[0], model[2], model):
        module.unshard()
        found += [p.detach().float().clone() for p in module.parameters(recurse=module is not model)]
        if module is model:
            found += [p.detach().float().clone() for layer in model[4:] for p in layer.parameters()]
        module.reshard()
    return found


def start(name: str = "plain", lr: float = 0.02, **options: Any) -> tuple[Any, Any, Any]:
    model = build(sharded.of_all(), name)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, quantize(model, 8, 4, **options), torch.optim.AdamW(trained, lr=lr)


def in_forward(model: Any) -> Callable[[], Tensor]:
    """Note the first layer's weights in each forward pass. Returns the last ones."""
    used = list[Tensor]()
    model[0].register_forward_pre_hook(lambda *_: used.append(model[0].weight.detach().float().clone()))
    return lambda: used[-1]


@KINDS
@on_ranks
def test_the_first_gather_is_exact(transport: Any, name: str) -> str:
    model, quantizer, _ = start(name)
    weights = in_forward(model)
    loss_of(model, batches(1, transport.rank)[0])
    exact = model[0].weight.full_tensor().detach()
    assert torch.equal(weights(), exact.bfloat16().float() if name == "bf16" else exact)
    quantizer.close()
    return digest([weights()])


@KINDS
@on_ranks
def test_gathered_weights_follow_within_half_a_level_of_the_difference(transport: Any, name: str) -> str:
    model, quantizer, optimizer = start(name)
    weights, before = in_forward(model), None
    for batch in batches(5, transport.rank):
        train(model, optimizer, [batch])
        assert before is None or not torch.equal(weights(), before)
        before = weights()
    exact = model[0].weight.full_tensor().detach()
    difference = float((exact - before).abs().max())
    loss_of(model, batches(1, transport.rank)[0])
    rounding = 2**-8 * float(exact.abs().max()) if name == "bf16" else 1e-7
    assert 0 < float((exact - weights()).abs().max()) <= difference * (1 + 2**-7) / 14 + rounding
    model.reshard()
    quantizer.close()
    return digest([weights()])


@KINDS
@on_ranks
def test_backward_computes_with_the_weights_of_forward(transport: Any, name: str) -> None:
    model, quantizer, optimizer = start(name)
    layer, used = model[0], list[Tensor]()

    def note(*_: Any) -> None:
        used.append(layer.weight.detach().float().clone())

    train(model, optimizer, batches(2, transport.rank))
    layer.register_forward_pre_hook(note)
    on_gradient(layer, note)
    loss_of(model, batches(1, transport.rank)[0]).backward()
    assert len(used) == 2 and used[0].equal(used[1])
    quantizer.close()


@on_ranks
def test_bytes_are_those_of_the_formula(transport: Any) -> None:
    """The first gather in full, the second as differences, and nothing in backward."""
    model = build(sharded.of_all())
    quantizer, optimizer = quantize(model, None, 4), torch.optim.SGD(model.parameters(), lr=0.02)
    sent = [0]
    for batch in batches(3, transport.rank):
        train(model, optimizer, [batch])
        sent.append(quantizer.meter.payload_bytes)
    formulas = [0, 0]
    for modules in ([model[0]], [model[2], model[3]], [model[4], model[5]]):
        shards = [-(-p.shape[0] // transport.size) * p[0].numel() for m in modules for p in m.parameters()]
        for i, row in enumerate((4 * sum(shards), sum(-(-m // 128) * 66 for m in shards))):
            formulas[i] += 24 + -(-row // 8) * 8
    assert [b - a for a, b in zip(sent, sent[1:], strict=False)] == [formulas[0], formulas[1], formulas[1]]
    quantizer.close()


@on_ranks
def test_a_step_sends_at_most_1_6_bytes_per_parameter(transport: Any) -> None:
    """With gradients of 4 bits too, at sizes where headers and the ends of blocks count for little."""
    model: Any = shard_of_large_layers()
    quantizer, optimizer = quantize(model, 4, 4), torch.optim.SGD(model.parameters(), lr=0.02)
    before, sizes = 0.0, list[float]()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 256)).square().mean().backward()
        optimizer.step()
        sizes.append(quantizer.meter.wire_bytes - before)
        before = quantizer.meter.wire_bytes
    numel, others = sum(p.numel() for p in model.parameters()), transport.size - 1
    assert sizes[1] / (numel * others / transport.size) <= 1.6
    quantizer.close()


def shard_of_large_layers() -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(256, 384), nn.Tanh(), nn.Linear(384, 384), nn.LayerNorm(384), nn.Linear(384, 192)]
    return shard(nn.Sequential(*layers), sharded.of_all())


@on_ranks
def test_evaluation_sends_nothing_and_leaves_no_trace(transport: Any) -> str:
    ends, (batch,) = list[str](), batches(1, 9)
    for evaluates in (False, True):
        model, quantizer, optimizer = start()
        for own in batches(4, transport.rank):
            train(model, optimizer, [own])
            if evaluates:
                with torch.no_grad():
                    first = loss_of(model, batch)
                    sent = quantizer.meter.payload_bytes
                    assert torch.equal(loss_of(model, batch), first)
                assert quantizer.meter.payload_bytes == sent
        model.reshard()
        ends.append(digest([whole(model)]))
        quantizer.close()
    assert ends[0] == ends[1]
    return ends[0]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "load_state_dict": lambda model: model.load_state_dict(build(sharded.of_all()).state_dict()),
    "reset_parameters": lambda model: model[0].reset_parameters(),
    "init": lambda model: nn.init.constant_(model[0].weight, 0.3),
    "in place": lambda model: model[0].weight.mul_(2.0),
}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks
def test_a_change_that_is_not_a_step_is_gathered_in_full(transport: Any, change: str) -> None:
    model, quantizer, optimizer = start()
    weights, (batch,) = in_forward(model), batches(1, transport.rank)
    train(model, optimizer, batches(2, transport.rank))
    for steps in (False, True):  # an optimizer's step may come between
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # random numbers of DTensor on a CPU
            CHANGES[change](model)
        if steps:
            optimizer.step()
        loss_of(model, batch)
        model.reshard()
        assert torch.equal(weights(), model[0].weight.full_tensor())
    quantizer.close()


@on_ranks
def test_a_change_in_memory_is_refused_until_it_is_told(transport: Any) -> None:
    model, quantizer, optimizer = start()
    weights, (batch,) = in_forward(model), batches(1, transport.rank)
    train(model, optimizer, batches(2, transport.rank))
    loss_of(model, batch)
    model.reshard()
    local_part(model[0].weight).detach().mul_(2.0)
    refused("call quantizer.weights_changed() on every rank", lambda: loss_of(model, batch), RuntimeError)
    model.reset_iter_state()
    quantizer.weights_changed()
    loss_of(model, batch)
    model.reshard()
    assert torch.equal(weights(), model[0].weight.full_tensor())
    quantizer.close()


@on_ranks
def test_a_step_of_another_model_changes_nothing(transport: Any) -> None:
    model, quantizer, optimizer = start()
    other, (batch,) = nn.Linear(2, 2), batches(1, transport.rank)
    train(model, optimizer, [batch])
    loss_of(model, batch)
    sent = quantizer.meter.payload_bytes
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    loss_of(model, batch)
    assert quantizer.meter.payload_bytes == sent
    model.reshard()
    quantizer.close()


@on_ranks
def test_a_dropped_step_leaves_the_same_weights_on_all_ranks(transport: Any) -> str:
    model, quantizer, optimizer = start()
    weights, factor, ends = in_forward(model), torch.ones(()), list[Tensor]()
    on_gradient(model[0], partial(torch.mul, factor))
    for step, batch in enumerate(batches(5, transport.rank)):
        factor.fill_(float("nan") if step == 2 and transport.rank == 1 else 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of the dropped step, on rank 0
            train(model, optimizer, [batch])
        ends.append(weights())
    assert quantizer.dropped_steps == 1 and all(end.isfinite().all() for end in ends)
    quantizer.close()
    return digest(ends)


@on_ranks
def test_nan_in_weights_is_an_error_until_others_are_loaded(transport: Any) -> str:
    model, quantizer, optimizer = start()
    weights, (batch,) = in_forward(model), batches(1, transport.rank)
    train(model, optimizer, [batch])
    good = {name: value.clone() for name, value in model.state_dict().items()}
    if transport.rank == 0:
        local_part(model[0].weight).detach()[0, 0] = float("nan")
    optimizer.zero_grad()
    optimizer.step()
    words = "0.weight on rank 0 has NaN or inf, or is 2**64 or more: it cannot be trained further"
    refused(words, lambda: loss_of(model, batch), RuntimeError)
    model.reset_iter_state()
    model.load_state_dict(good)
    train(model, optimizer, [batch])
    quantizer.close()
    return digest([weights(), whole(model)])


@pytest.mark.parametrize("order", ["model first", "model last", "after an evaluation"])
@on_ranks
def test_a_loaded_run_continues_bit_for_bit(transport: Any, tmp_path: Path, order: str) -> str:
    ends, inputs = list[str](), batches(6, transport.rank)
    for resumes in (False, True):
        model, quantizer, optimizer = start()
        weights = in_forward(model)
        train(model, optimizer, inputs[:3])
        if order == "after an evaluation":
            loss_of(model, inputs[0])
            model.reshard()
        if resumes:
            saved = {"model": model.state_dict(), "wire": quantizer.state_dict()}
            momenta = optimizer.state_dict()
            checkpoint.save(saved, checkpoint_id=tmp_path)
            quantizer.close()
            model, quantizer, optimizer = start()
            weights = in_forward(model)
            loaded: Any = {"model": model.state_dict(), "wire": quantizer.state_dict()}
            checkpoint.load(loaded, checkpoint_id=tmp_path)
            if order == "model last":
                quantizer.load_state_dict(loaded["wire"])
            model.load_state_dict(loaded["model"])
            if order != "model last":
                quantizer.load_state_dict(loaded["wire"])
            optimizer.load_state_dict(momenta)
        train(model, optimizer, inputs[3:])
        ends.append(digest([whole(model), weights()]))
        quantizer.close()
    assert ends[0] == ends[1]
    return ends[0]


@on_ranks
def test_fewer_ranks_continue_with_the_same_gathered_weights(transport: Any, tmp_path: Path) -> None:
    model, quantizer, optimizer = start()
    weights = in_forward(model)
    train(model, optimizer, batches(3, transport.rank))
    saved = {"model": model.state_dict(), "wire": quantizer.state_dict()}
    checkpoint.save(saved, checkpoint_id=tmp_path)
    before = weights()
    exact = model[0].weight.full_tensor().detach()
    quantizer.close()
    two = kept("two", lambda: DeviceMesh("cpu", [0, 1]))
    if transport.rank < 2:
        model = build(two)
        quantizer = quantize(model, 8, 4)
        state = {"model": model.state_dict(), "wire": quantizer.state_dict(of_each_rank=False)}
        checkpoint.load(state, checkpoint_id=tmp_path, process_group=two.get_group())
        model.load_state_dict(state["model"])
        quantizer.load_state_dict(state["wire"])
        found = quantizer.state_dict()["weights"]["0.weight"].full_tensor()
        assert torch.equal(found, before)
        weights = in_forward(model)
        loss_of(model, batches(1, transport.rank)[0])
        model.reshard()
        limit = float((exact - before).abs().max()) * (1 + 2**-7) / 14 + 1e-7
        assert 0 < float((weights() - exact).abs().max()) <= limit
        quantizer.close()


@on_ranks
def test_a_state_with_other_tables_is_refused(transport: Any) -> None:
    model, quantizer, optimizer = start()
    train(model, optimizer, batches(1, transport.rank))
    state = quantizer.state_dict()
    missing = {**state, "weights": {**state["weights"]}}
    missing["weights"].pop("0.bias")
    words = "the state lacks gathered weights of 0.bias: it was saved with another model or weights="
    refused(words, partial(quantizer.load_state_dict, missing))
    damaged = {**state, "weights": {**state["weights"], "0.bias": state["weights"]["0.weight"]}}
    refused("the gathered weights of 0.bias is not sharded", partial(quantizer.load_state_dict, damaged))
    quantizer.close()
    other = quantize(model, 8, 8)
    refused("the state has gathered weights of 0.bias", partial(other.load_state_dict, state))
    other.close()


@pytest.mark.proof  # two minutes of a core
@pytest.mark.parametrize("name", ["plain", "bf16"])
@on_ranks
def test_the_loss_after_200_steps_is_within_half_a_percent(transport: Any, name: str) -> None:
    """Of the same training with the gradients of these bits and exact weights, or weights of 8 bits."""
    ends, inputs = dict[Any, float](), batches(200, transport.rank)
    for bits in (None, (16, 8), (16, 4), (8, 4), (4, 8), (4, 4)):
        model = build(sharded.of_all(), name)
        quantizer = None if bits is None else quantize(model, *bits)
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), inputs)
        if quantizer is not None:
            quantizer.close()  # the loss is that of the exact weights
        with torch.no_grad():
            loss = torch.stack([loss_of(model, batch) for batch in inputs[:20]]).mean()
        dist.all_reduce(loss)
        ends[bits] = float(loss)
    pairs = {(16, 8): None, (16, 4): None, (8, 4): None, (4, 4): (4, 8)}
    for bits, other in pairs.items():
        assert abs(ends[bits] / ends[other] - 1) <= 0.005, (bits, ends)


@on_ranks
def test_one_optimizer_for_each_parameter_that_steps_in_backward_keeps_the_weights_of_the_others(
    transport: Any,
) -> None:
    model = build(sharded.of_all())
    quantizer, used = quantize(model, None, 4), list[Tensor]()
    layer = model[0]
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.02)
        p.register_post_accumulate_grad_hook(lambda p, o=optimizer: (o.step(), o.zero_grad()))
    layer.register_forward_pre_hook(lambda *_: used.append(layer.weight.detach().clone()))
    on_gradient(layer, lambda gradient: used.append(layer.weight.detach().clone()))
    for batch in batches(3, transport.rank):
        loss_of(model, batch).backward()
    assert used[2].equal(used[3]) and used[4].equal(used[5]) and not used[2].equal(used[4])
    quantizer.close()
