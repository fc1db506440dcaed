"""Exceptions in DDP's backward, copies of a hooked model, and parameters that are unfrozen, in one process."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from ddp.failing_net import Net
from optim.nets import alone, through_a_file
from parallel.ddp_trainer import OPTIONS, top_k
from refusals import refuse
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from dgc.compression import DenseCompressor, ScaledSignCompressor
from dgc.ddp import compress

LAYERS, SIZE = 5, 32


class FailingCompressor(DenseCompressor):
    fails_in: str | None = None

    def reduce(self, bucket: Any, state: Any) -> Any:
        if self.fails_in is not None and bucket.name.endswith(self.fails_in):
            raise KeyError("of the compressor")
        return (yield from super().reduce(bucket, state))


def build(compression: Any, **options: Any) -> tuple[Any, Any]:
    # a bucket of DDP and one of ours for each layer
    model = DistributedDataParallel(Net(LAYERS, SIZE), bucket_cap_mb=4 * SIZE * SIZE / 2**20, **options)
    return model, compress(model, compression, transport=alone(), bucket_mb=4.2 * SIZE * SIZE / 2**20)


def gradients(model: Any, scale: float = 1.0) -> list[Tensor]:
    model.zero_grad()
    model(torch.full((2, SIZE), scale)).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize("at", [LAYERS, LAYERS - 1, 1])
def test_after_an_exception_the_exchange_is_clean_or_refuses(mode: str, at: int) -> None:
    """Before any gradient, after some, and after some buckets. DDP itself goes on only in the first case."""
    for first in (True, False)[mode == "static" :]:
        (model, exchange), (other, _) = (build(top_k(), **OPTIONS[mode]) for _ in range(2))
        if not first:
            for _ in range(2):
                gradients(model), gradients(other)
        model.module.fail(at, lambda model=model: gradients(model, 3.0))
        has_sent = exchange._engine.in_flight
        if at < LAYERS:
            with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
                gradients(model)
            model._update_process_group(model.process_group)  # lets DDP begin anew
        if has_sent:
            for _ in range(2):
                for act in (lambda model=model: gradients(model), exchange.compression_state_dict):
                    with pytest.raises(RuntimeError, match="an earlier step ended with an exception, in backward"):
                        act()
                model._update_process_group(model.process_group)
        for _ in () if has_sent else range(3):
            assert all(map(torch.equal, gradients(model), gradients(other)))
        assert not has_sent if at == LAYERS else has_sent or first or at > 1


def test_after_an_exception_of_a_compressor_its_reason_is_told() -> None:
    for name in (".0", ".2", f".{LAYERS - 1}"):
        compressor = FailingCompressor()
        model, exchange = build(compressor)
        gradients(model)
        compressor.fails_in = name
        with pytest.raises(KeyError):
            gradients(model)
        compressor.fails_in = None
        for act in (partial(gradients, model), partial(gradients, model), exchange.compression_state_dict):
            model._update_process_group(model.process_group)
            with pytest.raises(RuntimeError, match=r"KeyError: 'of the compressor': ranks may have sent"):
                act()


@pytest.mark.parametrize(
    "call",
    [
        lambda exchange, state: exchange.compression_state_dict(),
        lambda exchange, state: exchange.gather_state(),
        lambda exchange, state: exchange.load_compression_state_dict(state),
        lambda exchange, state: exchange.begin_epoch(1),
    ],
    ids=["save", "gather", "load", "begin_epoch"],
)
def test_a_call_that_is_refused_while_gradients_are_exchanged_changes_nothing(call: Any) -> None:
    (model, exchange), (other, _) = build(top_k()), build(top_k())
    state = exchange.compression_state_dict()
    gradients(model), gradients(other)  # from the second pass on, exchanges start during backward
    told = []

    def called(gradient: Tensor) -> None:
        with pytest.raises(RuntimeError, match="while gradients are exchanged: some buckets") as raised:
            call(exchange, state)
        told.append(str(raised.value))

    handle = model.module.layers[0].weight.register_hook(called)
    gradients(model), gradients(other)
    handle.remove()
    assert len(told) == 1
    assert all(map(torch.equal, gradients(model), gradients(other)))
    assert exchange.compression_state_dict()["identity"]["step"] == 3


def test_an_exception_outside_of_backward_changes_nothing() -> None:
    (model, _), (other, _) = build(top_k()), build(top_k())
    for step in range(3):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, SIZE + 1))
        loss = model(torch.ones(2, SIZE))  # and then an exception before backward
        del loss
        assert all(map(torch.equal, gradients(model, 1.0 + step), gradients(other, 1.0 + step)))


def test_exchanges_start_in_the_order_of_backward() -> None:
    """Before it rebuilds its buckets, DDP has one, in the order of the model."""
    model, exchange = build(top_k())
    for step in range(3):
        gradients(model, 1.0 + step)
    names = [exchange.planned[b].bucket.segments[0].name for b in exchange._engine.order.groups]
    weights = [name for name in names if name.endswith("weight")]
    assert weights == [f"layers.{i}.weight" for i in reversed(range(LAYERS))]


def test_a_copy_of_a_model_has_no_exchange() -> None:
    for make in (copy.deepcopy, partial(through_a_file, weights_only=False), lambda m: AveragedModel(m).module):
        model, exchange = build(top_k())
        gradients(model)
        sent, error = exchange.meter.payload_bytes, exchange.error_norm()
        other = make(model)
        assert type(other) is DistributedDataParallel and not other._comm_hooks
        dense = gradients(DistributedDataParallel(copy.deepcopy(model.module)))
        assert all(map(torch.equal, gradients(other), dense))
        assert (exchange.meter.payload_bytes, exchange.error_norm()) == (sent, error)
        again = compress(other, top_k(), transport=alone())
        gradients(other)
        assert again.error_norm() > 0 and exchange.error_norm() == error
        gradients(model)
        assert exchange.meter.payload_bytes == 2 * sent and exchange.error_norm() != error


def test_a_parameter_that_is_frozen_later_gets_no_gradient() -> None:
    model, _ = build(top_k(), find_unused_parameters=True)
    gradients(model)
    model.module.layers[1].requires_grad_(False)
    model.zero_grad()
    model(torch.ones(2, SIZE)).backward()
    assert all((p.grad is None) == (not p.requires_grad) for p in model.parameters())


def test_an_exchange_cannot_be_copied() -> None:
    _, exchange = build(top_k())
    with pytest.raises(TypeError, match="a DDPExchange cannot be copied or pickled: save"):
        copy.deepcopy(exchange)


def test_a_parameter_that_is_unfrozen_after_wrapping_is_refused_unless_ddp_ignores_it() -> None:
    net = Net(LAYERS, SIZE)
    net.ignored = nn.Parameter(torch.ones(1), requires_grad=False)
    net.layers[1].requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, [".ignored"])
    model = DistributedDataParallel(net)
    compress(model, top_k(), transport=alone())
    net.ignored.requires_grad_(True)
    for _ in range(2):
        model(torch.ones(2, SIZE)).backward()
    net.layers[1].requires_grad_(True)
    message = r"layers\.1\.weight, layers\.1\.bias required no gradient when DistributedDataParallel was built"
    with pytest.raises(RuntimeError, match=message):
        model(torch.ones(2, SIZE)).backward()


def test_a_mean_over_fewer_ranks_in_join_is_refused() -> None:
    model, _ = build(top_k())
    with model.join():
        gradients(model)
    refusal = pytest.raises(RuntimeError, match=r"join\(divide_by_initial_world_size=False\) cannot be served")
    with refusal, model.join(divide_by_initial_world_size=False):
        gradients(model)


@pytest.mark.usefixtures("no_type_checks")  # compress takes what torch.compile returns for a model in DDP
def test_a_compiled_model() -> None:
    compiled: Any = torch.compile(DistributedDataParallel(nn.Linear(8, 8)), backend="eager")
    exchange = compress(compiled, ScaledSignCompressor(), transport=alone())
    compiled(torch.ones(2, 8)).square().sum().backward()
    assert exchange.error_norm() > 0
    other: Any = torch.compile(nn.Linear(8, 8), backend="eager")
    refuse("compress needs a model in DistributedDataParallel", compress, other, ScaledSignCompressor())


@pytest.mark.filterwarnings("ignore:.*drops this step")
@pytest.mark.parametrize("compression", [DenseCompressor, ScaledSignCompressor, top_k])
def test_one_rank_drops_a_step_with_nan(compression: Any) -> None:
    model, exchange = build(compression())
    gradients(model)
    first = next(model.parameters())
    handle = first.register_hook(lambda gradient: gradient * torch.nan)
    model.zero_grad()
    model(torch.ones(2, SIZE)).backward()
    assert exchange.dropped_steps == 1 and first.grad is None
    handle.remove()
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(model))
