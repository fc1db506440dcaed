"""dgc.fsdp on one rank, where FSDP2 leaves out its collectives: the same checks as on more, in this process."""

from functools import partial
from typing import Any

import pytest
import torch
from laws.hostile import NUMBERS, TENSORS
from parallel import sharded
from parallel.sharded import batches, check_a_dropped_step, loss_of, network, train
from refusals import check_refusals, refuse
from states import assert_equal
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, init_device_mesh

from dgc.comm.transport import Transport
from dgc.compression import TwoPhaseCompressor
from dgc.core.bucket import local_part
from dgc.fsdp import compress, local_mesh, quantize

pytestmark = pytest.mark.usefixtures("no_type_checks")


def alone(transport: Transport, model: Any = None, **options: Any) -> Any:
    return sharded.shard(model or network(), init_device_mesh("cpu", (transport.size,)), **options)


def quantized(transport: Transport, **options: Any) -> tuple[Any, Any, Any]:
    model = alone(transport)
    return model, quantize(model, 4, **options), torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def between_machines(transport: Transport, **options: Any) -> tuple[Any, Any, Any]:
    model = sharded.shard(network(), local_mesh(transport))
    exchange = compress(model, TwoPhaseCompressor(), transport=transport, **options)
    return model, exchange, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


@pytest.mark.parametrize(("start", "unscales"), [(quantized, False), (between_machines, True)])
def test_a_nonfinite_gradient_drops_the_step(transport: Transport, start: Any, unscales: bool) -> None:
    reason = "the gradient of 0.weight on rank 0 has NaN or inf, or is 2**64 or more"
    check_a_dropped_step(transport, partial(start, transport), reason, lambda _: None, unscales)


def test_a_gradient_of_more_than_2_to_64_drops_the_step_without_its_loss_scale(transport: Transport) -> None:
    model = alone(transport)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    quantizer = quantize(model, grad_scaler=scaler)
    for factor, dropped in ((2.0**30, 0), (2.0**70, 1)):
        scaler.scale(loss_of(model, batches(1, 0)[0]) * factor).backward()
        assert quantizer.dropped_steps == dropped
    quantizer.close()


@pytest.mark.parametrize("gradients", [8, None])
def test_weights_with_nan_end_the_forward_pass(transport: Transport, gradients: Any) -> None:
    model = alone(transport)
    quantizer, batch = quantize(model, gradients, 8), batches(1, 0)[0]
    loss_of(model, batch).backward()
    with torch.no_grad():
        local_part(model[2].weight)[0, 0] = torch.nan
    words = "2.weight on rank 0 has NaN or inf, or is 2\\*\\*64 or more: it cannot be trained further"
    check_refusals((partial(loss_of, model, batch), words), kind=RuntimeError)
    quantizer.close()
    loss_of(model, batch)


def test_gradients_in_fp16_are_refused(transport: Transport) -> None:
    model = alone(transport, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    quantizer = quantize(model)
    loss = loss_of(model, batches(1, 0)[0])
    check_refusals((loss.backward, "reduce_dtype=torch.float32"), kind=RuntimeError)
    quantizer.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hadamard": 1}, "hadamard must be one of True, False, not 1"),
        ({"gradients": True}, "gradients must be one of 16, 8, 4, None, not True"),
        ({"weights": 8.0}, "weights must be one of 8, 4, None, not 8.0"),
        ({"block": torch.tensor(128)}, "block must be one of 64, 128, 256, 512, None, not tensor"),
        ({"seed": 0.5}, "seed must be a whole number, not 0.5"),
        ({"error": b"int8"}, "error must be one of 'auto', 'int8', 'float32', None, not b'int8'"),
    ],
)
def test_an_argument_of_another_type_is_refused(transport: Transport, options: Any, words: str) -> None:
    refuse(words, quantize, alone(transport), **options)


@pytest.mark.parametrize("start", [quantized, between_machines])
def test_a_trainable_parameter_without_elements_is_refused(transport: Transport, start: Any) -> None:
    """FSDP2 itself fails when it reduces its gradient."""
    model = network()
    model[0].none = nn.Parameter(torch.zeros(3, 0))
    mesh = local_mesh(transport) if start is between_machines else init_device_mesh("cpu", (1,))
    exchange: Any = partial(compress, transport=transport) if start is between_machines else quantize
    refuse("0.none has no elements", exchange, sharded.shard(model, mesh))


def errors_of(quantizer: Any) -> Any:
    return {what: {n: local_part(e) for n, e in part.items()} for what, part in quantizer.state_dict().items()}


@pytest.mark.parametrize("error", ["int8", "float32"])
def test_a_damaged_state_is_refused_before_anything_changes(transport: Transport, error: str) -> None:
    model = alone(transport)
    quantizer, optimizer = quantize(model, 4, error=error), torch.optim.SGD(model.parameters(), lr=0.02)
    own = next(iter(quantizer._sums))
    own.kept = own.stored(torch.linspace(-1, 1, own.layout.numel))  # on one rank nothing is rounded
    before, number = errors_of(quantizer), 0
    for exact in (True, False):
        for part in ("errors", "ranks") if exact else ("errors",):
            for kind, damage in {**TENSORS, **NUMBERS}.items():
                state: Any = quantizer.state_dict(of_each_rank=exact)
                name, valid = next(iter(state[part].items()))
                if kind in NUMBERS and error == "int8" and part == "ranks":
                    damaged = local_part(valid).clone()  # the scale of the first block
                    damaged.view(-1)[:2] = torch.tensor([damage(torch.ones(1))]).bfloat16().view(torch.uint8)
                else:
                    damaged = damage(local_part(valid))
                if isinstance(damaged, Tensor) and damaged.layout == torch.strided:
                    damaged = DTensor.from_local(damaged, valid.device_mesh, valid.placements, run_check=False)
                state[part][name] = damaged
                refuse("the error of|a scale of", quantizer.load_state_dict, state)
                assert_equal(errors_of(quantizer), before, kind)
                number += 1
        empty: dict[str, Any] = {}
        other: Any
        for other in (
            None,
            3,
            "state",
            empty,
            {"errors": {}},
            {"errors": {}, "ranks": {}, "counts": {}},
            {**state, "more": {}},
        ):
            refuse("state", quantizer.load_state_dict, other)
    assert number == 48
    quantizer.load_state_dict(quantizer.state_dict())
    assert_equal(errors_of(quantizer), before)
    train(model, optimizer, batches(1, 0))
    quantizer.close()
