"""dgc.fsdp.quantize on ranks that shard one model."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from cases import case
from parallel import sharded
from parallel.found import digest, refused, told
from parallel.ranks import each_rank_of, over, torchrun
from parallel.sharded import batches, build, kept, loss_of, network, on_gradient, shard, train, whole
from torch import Tensor
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from dgc.core.bucket import local_part
from dgc.core.envelope import PayloadError
from dgc.fsdp import quantize, quantized

on_ranks = each_rank_of(over(torchrun, 3), *(over(torchrun, ranks, pytest.mark.proof) for ranks in (2, 4)))


def sgd(model: Any, lr: float = 0.02, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def exact_error(quantizer: Any) -> str:
    return digest(part.to_local() for part in quantizer.state_dict()["ranks"].values())


def sum_of_gradients(model: Any, rank: int, accumulate: bool = False) -> list[Tensor]:
    """The sums of what two steps get, of a model that does not change. Each has two backward passes."""
    trained = [p for p in model.parameters() if p.requires_grad]
    sums, inputs = [torch.zeros(p.shape) for p in trained], batches(4, rank)
    for step in range(2):
        model.zero_grad()
        for i in range(2):
            if accumulate:
                model.set_requires_gradient_sync(i == 1)
            loss_of(model, inputs[2 * step + i]).backward()
        for total, p in zip(sums, trained, strict=True):
            if p.grad is not None:
                total += p.grad.full_tensor().float()
    return sums


MODELS = "plain,no sync,repeated,tied,columns,frozen,checkpointed,divided,bf16,bf16 reduce".split(",")


@pytest.mark.parametrize("name", MODELS)
@on_ranks
def test_what_is_sent_plus_the_error_is_the_gradient(transport: Any, name: str) -> None:
    """Up to rounding, relative to the largest element."""
    expected = sum_of_gradients(build(sharded.of_all(), name), transport.rank, name == "no sync")
    rounding = 2e-2 if name == "bf16 reduce" else 2e-6
    rows: list[Any] = [(8, "float32", rounding), (4, "int8", max(rounding, 5e-3)), (16, "float32", rounding)]
    for bits, error, bound in [*rows, (None, None, 0.0)] if name == "plain" else rows:
        model = build(sharded.of_all(), name)
        quantizer = quantize(model, bits, error=error, hadamard=bits == 4)
        sums = sum_of_gradients(model, transport.rank, name == "no sync")
        errors = quantizer.state_dict()["errors"]
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        assert set(errors) == (set(names) if error else set())
        factor = transport.size / 3.0 if name == "divided" else 1.0
        largest = max(float(e.abs().max()) for e in expected)
        for parameter, own, e in zip(names, sums, expected, strict=True):
            kept_back = factor * errors[parameter].full_tensor() if error else 0.0
            difference = float((own + kept_back - e).abs().max()) / largest
            assert difference <= bound, (bits, parameter, difference)
        sent = quantizer.meter.payload_bytes
        loss_of(model, batches(1, transport.rank)[0]).backward()
        assert (0 < sent < quantizer.meter.payload_bytes) if bits else quantizer.meter.payload_bytes == 0
        quantizer.close()


@on_ranks
def test_collectives_overlap_unless_gradients_are_read_during_backward(transport: Any) -> None:
    """What backward launches, gathers "g" and sums "s", and waits for, "G" and "S", by who reads gradients."""
    gradients = []
    real: dict[str, Any] = {"g": dist.all_gather_single, "s": quantized.exchange_parts}
    waits = "gGgsSGsSsS"  # the second gather is prefetched
    for reader, order in (("nothing", "gGgsGsSsSS"), ("parameters", waits), ("all-reduce", waits)):
        model, early, events = build(sharded.of_all()), dict[Tensor, Tensor](), list[str]()
        quantizer = quantize(model, 8, 8)
        for p in model.parameters() if reader == "parameters" else ():
            p.register_post_accumulate_grad_hook(
                lambda p, early=early: early.update({p: local_part(p.grad).clone()})
            )
        for module in (model[0], model[2], model) if reader == "all-reduce" else ():
            module.set_all_reduce_hook(lambda output: output.mul_(2))

        def launch(kind: str, *arguments: Any, events: list[str] = events, **options: Any) -> Any:
            def wait(*_: Any) -> None:
                events.append(kind.upper())
                for work in works:
                    work.wait()

            events.append(kind)
            begun = real[kind](*arguments, **options)
            works = begun if kind == "s" else [begun]
            return [Mock(wait=wait)] if kind == "s" else Mock(wait=wait)

        loss = loss_of(model, batches(1, transport.rank)[0])
        sums = patch.object(quantized, "exchange_parts", partial(launch, "s"))
        with sums, patch.object(dist, "all_gather_single", partial(launch, "g")):
            loss.backward()
        assert "".join(events) == order, (reader, events)
        gradients.append([local_part(p.grad) for p in model.parameters() if p.grad is not None])
        assert len(early) == len(gradients[-1]) * (reader == "parameters")
        assert all(p.grad is not None and own.equal(local_part(p.grad)) for p, own in early.items())
        quantizer.close()
    for own, same, twice in zip(*gradients, strict=True):
        assert own.equal(same) and (2 * own).equal(twice)


KINDS_OF_WEIGHTS = pytest.mark.parametrize("name", ["plain", "frozen", "bf16", "columns", "resharded"])


@KINDS_OF_WEIGHTS
@on_ranks
def test_backward_uses_the_rounded_weights_of_forward(transport: Any, name: str) -> str:
    model = build(sharded.of_all(), name)
    layer, used = model[0], list[Tensor]()
    quantizer = quantize(model, None, 8)

    def note(*_: Any) -> None:
        used.append(layer.weight.detach().float().clone())  # the storage of a numpy array could not be freed

    layer.register_forward_pre_hook(note)
    on_gradient(layer, note)
    loss_of(model, batches(1, transport.rank)[0]).backward()
    layer.unshard(async_op=True).wait()
    note()
    layer.reshard()
    assert len(used) == 3 and used[0].equal(used[1]) and used[0].equal(used[2])
    exact = layer.weight.full_tensor().detach()
    bound = 0.51 / 127 + 2**-8 + (2**-8 if name == "bf16" else 0)
    assert 0 < float((used[0] - exact).abs().max()) < float(exact.abs().max()) * bound
    quantizer.close()
    return digest(used[:1])


@KINDS_OF_WEIGHTS
@on_ranks
def test_shards_are_not_rounded(transport: Any, name: str) -> None:
    model = build(sharded.of_all(), name)
    before, layer = whole(model), model[0]
    quantizer = quantize(model, None, 8)
    loss_of(model, batches(1, transport.rank)[0]).backward()
    assert torch.equal(whole(model), before)
    exact = layer.weight.full_tensor().detach()
    quantizer.close()
    with torch.no_grad():
        layer.unshard()
    assert torch.equal(layer.weight.float(), exact.to(layer.weight.dtype).float())
    model.reshard()


@on_ranks
def test_fp16_weights_that_round_beyond_its_largest_number_stay_finite(transport: Any) -> None:
    """The scale of a block is rounded up: the scale of 65504 to 65536."""
    model = shard(network(), sharded.of_all(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    quantizer = quantize(model, None, 8)
    with torch.no_grad():
        local_part(model[0].weight).fill_(65500.0)
    model[0].unshard()
    assert torch.equal(model[0].weight, torch.full_like(model[0].weight, 65504.0))
    model[0].reshard()
    quantizer.close()


@on_ranks
def test_the_meter_counts_the_bytes_of_the_formula(transport: Any) -> None:
    for bits, block, weights in ((8, 256, None), (4, 128, 8), (4, 64, None), (16, None, 8)):
        model = build(sharded.of_all())
        quantizer = quantize(model, bits, weights, block=block)
        loss_of(model, batches(1, 0)[0]).backward()
        formula = 0
        for g, modules in enumerate(([model[0]], [model[2], model[3]], [model[4], model[5]])):
            shards = [-(-p.shape[0] // transport.size) * p[0].numel() for m in modules for p in m.parameters()]
            sends: list[Any] = [
                (transport.size, bits, block),
                *([(1 if g == 2 else 2, 8, 256)] if weights else []),
            ]
            for n, b, s in sends:
                row = 2 * sum(shards) if s is None else sum(-(-m // s) * (2 + s * b // 8) for m in shards)
                formula += n * (24 + -(-row // 8) * 8)
        assert quantizer.meter.payload_bytes == formula, (bits, block, weights)
        quantizer.close()


@on_ranks
def test_the_meter_counts_the_collectives_of_fsdp2_too(transport: Any) -> None:
    for bits, block, weights in ((8, 256, None), (4, 128, 8), (4, 64, None)):
        model = build(sharded.of_all())
        quantizer = quantize(model, bits, weights, block=block)
        loss_of(model, batches(1, 0)[0]).backward()
        meter = quantizer.meter
        assert meter.dense_cross_wire_bytes == meter.dense_wire_bytes > 0
        assert all(meter.seconds[phase] > 0 for phase in ("compress", "launch", "wait", "decode"))
        assert meter.summary().endswith("FSDP2's own collectives")
        quantizer.close()


@on_ranks
def test_a_nonfinite_gradient_drops_the_step_everywhere(transport: Any) -> dict[str, str]:
    def start(**options: Any) -> tuple[Any, Any, Any]:
        model = build(sharded.of_all())
        return model, quantize(model, 4, **options), sgd(model, momentum=0.9)

    reason = f"the gradient of 0.weight on rank {transport.size - 1} has NaN or inf, or is 2**64 or more"
    return sharded.check_a_dropped_step(transport, start, reason, exact_error, unscales=False)


@on_ranks
def test_an_exception_in_backward_leaves_nothing_behind(transport: Any) -> None:
    """After one of three groups was reduced. FSDP2 itself keeps the gradients of the outermost module."""
    (first, second), ends = batches(2, transport.rank), []

    for fails in (False, True):
        model = build(sharded.of_all())
        quantizer, optimizer = quantize(model, 4), sgd(model)
        train(model, optimizer, [first])
        if fails:
            error = exact_error(quantizer)
            with on_gradient(model[0], Mock(side_effect=ArithmeticError("in backward"))):
                assert told(partial(train, model, optimizer, [second]), ArithmeticError) == "in backward"
            model.reset_iter_state()
            assert exact_error(quantizer) == error
        train(model, optimizer, [second])
        ranks = quantizer.state_dict()["ranks"]
        ends.append(digest([model[2].weight.full_tensor(), ranks["2.weight"].to_local()]))
        quantizer.close()
    assert ends[0] == ends[1]


@pytest.mark.parametrize("error", ["int8", "float32"])
@on_ranks
def test_a_loaded_run_continues_bit_for_bit_also_on_fewer_ranks(
    transport: Any, tmp_path: Path, error: str
) -> None:
    inputs = batches(6, transport.rank)

    def start() -> tuple[Any, Any, Any]:
        model = build(sharded.of_all())
        return model, sgd(model, 0.05, momentum=0.9), quantize(model, 4, 8, error=error)

    model, optimizer, quantizer = start()
    train(model, optimizer, inputs[:3])
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state, "gradients": quantizer.state_dict()}
    checkpoint.save(saved, checkpoint_id=tmp_path)
    means = {name: mean.full_tensor() for name, mean in saved["gradients"]["errors"].items()}
    train(model, optimizer, inputs[3:])
    end = digest([whole(model)]), exact_error(quantizer)
    quantizer.close()

    model, optimizer, quantizer = start()
    weights, state = get_state_dict(model, optimizer)
    loaded: Any = {"model": weights, "optimizer": state, "gradients": quantizer.state_dict()}
    checkpoint.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    quantizer.load_state_dict(loaded["gradients"])
    train(model, optimizer, inputs[3:])
    assert (digest([whole(model)]), exact_error(quantizer)) == end
    handle = on_gradient(model[0], lambda gradient: refused("while gradients", quantizer.state_dict, RuntimeError))
    loss_of(model, inputs[0]).backward()
    handle.remove()
    refused("between the exchange of the gradients and the optimizer's step()", quantizer.state_dict, RuntimeError)
    quantizer.close()

    two = kept("two", lambda: DeviceMesh("cpu", [0, 1]))
    if transport.rank < 2:
        quantizer = quantize(build(two), 4, error=error)
        mean = quantizer.state_dict(of_each_rank=False)
        checkpoint.load({"gradients": mean}, checkpoint_id=tmp_path, process_group=two.get_group())
        quantizer.load_state_dict(mean)
        for name, own in quantizer.state_dict()["errors"].items():
            near = float(means[name].abs().max()) * (0.51 / 127 + 2**-8 if error == "int8" else 1e-6)
            torch.testing.assert_close(own.full_tensor(), means[name], rtol=0, atol=near)
        quantizer.close()


@on_ranks
def test_gradients_of_16_bits_are_the_mean_of_bfloat16_in_fp32(transport: Any) -> None:
    """In the order of ranks. The rest of the result is zero: nothing else is rounded."""
    model, batch = build(sharded.of_all()), batches(1, transport.rank)[0]
    alone = network()
    loss_of(alone, batch).backward()
    expected = []
    for p in alone.parameters():
        if p.grad is not None:
            parts = [torch.empty_like(p.grad) for _ in range(transport.size)]
            dist.all_gather(parts, p.grad.bfloat16().float())
            expected.append(torch.stack(parts).sum(0) / transport.size)
    quantizer = quantize(model, 16)
    loss_of(model, batch).backward()
    found = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(own, right, rtol=2e-6, atol=2e-6 * float(right.abs().max()))
    assert quantizer.state_dict() == dict.fromkeys(("errors", "ranks", "counts", "weights", "current"), {})
    quantizer.close()


@on_ranks
def test_random_gradients_continue_bit_for_bit(transport: Any, tmp_path: Path) -> None:
    inputs = batches(4, transport.rank)

    def start() -> tuple[Any, Any, Any]:
        model = build(sharded.of_all())
        return model, sgd(model, 0.05), quantize(model, 16, random=True, seed=3)

    ends = []
    for resumes in (False, True):
        model, optimizer, quantizer = start()
        train(model, optimizer, inputs[:2])
        if resumes:
            saved = {"model": model.state_dict(), "gradients": quantizer.state_dict()}
            checkpoint.save(saved, checkpoint_id=tmp_path)
            quantizer.close()
            model, optimizer, quantizer = start()
            loaded: Any = {"model": model.state_dict(), "gradients": quantizer.state_dict()}
            checkpoint.load(loaded, checkpoint_id=tmp_path)
            model.load_state_dict(loaded["model"])
            quantizer.load_state_dict(loaded["gradients"])
        train(model, optimizer, inputs[2:])
        ends.append(digest([whole(model)]))
        quantizer.close()
    model, optimizer = build(sharded.of_all()), None
    quantizer = quantize(model, 16)
    train(model, sgd(model, 0.05), inputs)
    quantizer.close()
    assert ends[0] == ends[1] != digest([whole(model)])


@pytest.mark.parametrize("error", ["int8", "float32"])
@on_ranks
def test_training_changes_no_state_that_was_saved_or_loaded(transport: Any, error: str) -> None:
    inputs = batches(6, transport.rank)

    def digests(state: Any) -> str:
        return digest(local_part(part) for table in state.values() for part in table.values())

    def start() -> tuple[Any, Any, Any]:
        model = build(sharded.of_all())
        return model, sgd(model, 0.05), quantize(model, 4, error=error)

    model, optimizer, quantizer = start()
    train(model, optimizer, inputs[:3])
    saved = quantizer.state_dict()
    before = digests(saved)
    quantizer.close()
    model, optimizer, quantizer = start()
    quantizer.load_state_dict(saved)
    again = quantizer.state_dict()
    for batch in inputs[3:]:
        train(model, optimizer, [batch])
        assert digests(saved) == digests(again) == before
    assert digests(quantizer.state_dict()) != before
    quantizer.close()


@on_ranks
def test_what_cannot_work_is_refused_with_one_error_on_every_rank(transport: Any) -> None:
    model, last = build(sharded.of_all()), transport.size - 1
    start = partial(quantize, model)
    refused("gradients must be one of 16, 8, 4, None, not 3", partial(start, 3))
    refused("weights must be one of 8, 4, None, not 3", partial(start, weights=3))
    refused("error must be one of 'auto', 'int8', 'float32', None, not 'bf16'", partial(start, error="bf16"))
    refused("block must be one of 64, 128, 256, 512, None, not 100", partial(start, block=100))
    refused("gradients of 16 bits have no blocks", partial(start, 16, hadamard=True))
    refused("random=True is for gradients=16 without error", partial(start, 8, random=True))
    refused("random=True is for gradients=16 without error", partial(start, 16, error="int8", random=True))
    different = f"gradients is 8 on rank 0 and 4 on rank {last}: every rank needs the same settings"
    refused(different, partial(start, 4 if transport.rank == last else 8))
    refused("trainable parameters are not sharded", partial(quantize, network()))
    first = start()
    refused("has a FSDPQuantizer already: close() it", start)
    refused("the state is not what state_dict()", partial(first.load_state_dict, {}))
    state, exact = first.state_dict(), first.state_dict()
    state["ranks"].pop("0.bias")
    refused("the state has no error of 0.bias", partial(first.load_state_dict, state))
    state, before = first.state_dict(), exact_error(first)
    if transport.rank == last:
        local_part(state["ranks"]["0.bias"]).view(torch.bfloat16)[0, 0] = torch.nan  # the scale of a block
    damaged = f"a scale of the error of 0.bias has NaN or inf (on rank {last})"
    refused(damaged, partial(first.load_state_dict, state))
    way = {**exact, "ranks": {}} if transport.rank == last else exact
    refused(f"ranks 0 and {last} load differently", partial(first.load_state_dict, way))
    assert exact_error(first) == before
    first.close()
    second = start(error="float32")
    refused("it was saved with another error= or number of ranks", partial(second.load_state_dict, exact))
    second.close()
    whole_model: Any = replicate(network(), mesh=sharded.of_all())
    refused("the parameters of the model are replicated", partial(quantize, whole_model))


@on_ranks
def test_a_step_that_cannot_work_is_refused(transport: Any) -> None:
    batch = batches(1, transport.rank)[0]

    def check(message: str, change: Callable[[Any], Any] | None = None, model: Any = None) -> None:
        model = model or build(sharded.of_all())
        quantizer = quantize(model, 8, 8)
        if change:
            change(model)
        with case(message):
            refused(message, lambda: loss_of(model, batch).backward(), RuntimeError)
        quantizer.close()

    check("call set_force_sum_reduction_for_comms(True)", lambda model: sharded.divide(model, 1.5, sums=False))
    check("close() the quantizer and call it again", lambda model: model[5].requires_grad_(False))
    mixed = network()
    mixed[0].bias.requires_grad_(False)
    mixed[0].bias.data = mixed[0].bias.data.half()
    check("are torch.uint8, not torch.float32", model=shard(mixed, sharded.of_all()))
    half = shard(network(), sharded.of_all(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    check("MixedPrecisionPolicy(reduce_dtype=torch.float32)", model=half)
    inf = "0.weight on rank 0 has NaN or inf, or is 2**64 or more: it cannot be trained further"
    check(inf, lambda model: local_part(model[0].weight).detach().fill_(float("inf")))


@on_ranks
def test_a_message_that_changed_is_refused(transport: Any) -> None:
    model, real, batch = build(sharded.of_all()), quantized.exchange_parts, batches(1, transport.rank)[0]
    quantizer = quantize(model)

    def damage(arrived: Sequence[Tensor], *arguments: Any) -> Any:
        works = real(arrived, *arguments)
        return [*works, Mock(wait=lambda: arrived[-1][-30:].bitwise_xor_(1))]

    with patch.object(quantized, "exchange_parts", damage):
        refused("a wrong checksum: it changed in transit", lambda: loss_of(model, batch).backward(), PayloadError)
    model.reset_iter_state()
    loss_of(model, batch).backward()
    quantizer.close()
