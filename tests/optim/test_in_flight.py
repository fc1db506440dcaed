"""What is in flight during backward: the order of the rounds, gradients that must not change, and exceptions."""

from functools import partial
from typing import Any

import pytest
import torch
from gossip.networks import top_k
from on_ranks import on_ranks
from optim import nets
from torch.nn.utils import clip_grad_norm_

from dgc.comm import AllReduce
from dgc.compression import DenseCompressor, PowerSGDCompressor, QSGDCompressor, TwoPhaseCompressor
from dgc.contrib import ZeroOneAdam, ZeroOneSteps
from dgc.core.protocol import StatelessCompressor
from dgc.core.results import DenseResult, Reduced
from dgc.local import Nesterov, OuterSteps
from dgc.optim import LocalOptimizer

RECIPE = r"call optimizer\.synchronize\(\) first, then clip, then step\(\) inside optimizer\.skip_synchronize\(\)"
BROKEN = r"an earlier step ended with an exception, MemoryError: own: ranks may have sent"
SMALL = 1e-4  # MB: several buckets, of which some start during backward


class ThreeRounds(StatelessCompressor):
    def reduce(self, bucket: Any, state: Any) -> Any:
        for _ in range(3):
            (mean,) = yield (AllReduce(bucket.flat.clone()),)
        bucket.flat.copy_(mean)
        return Reduced(DenseResult(), state)


def recording(is_prompt: bool = False) -> tuple[Any, list[Any]]:
    """A transport, and its calls. is_prompt: replies are there at once, or never before `wait`."""
    transport, events = nets.alone(), list[Any]()
    launch, wait = transport.launch, transport.wait

    def noted(name: Any, requests: Any, communicator: Any = "") -> Any:
        events.append(("launch", name))
        return name, launch(name, requests, communicator)

    def waited(work: Any) -> Any:
        events.append(("wait", work[0]))
        return wait(work[1])

    transport.launch, transport.wait, transport.poll = noted, waited, lambda work: is_prompt
    return transport, events


def of_three_rounds(is_prompt: bool) -> tuple[Any, Any, list[Any], list[str]]:
    """A model, its optimizer of several buckets, what the transport notes, and the names of the buckets."""
    model, (transport, events) = nets.net(), recording(is_prompt)
    optimizer = nets.wrap(model, transport, nets.dgc_sgd, compression=ThreeRounds(), bucket_mb=2e-4)
    names = [plan.bucket.name for plan in optimizer.planned]
    assert len(names) > 2
    events.clear()
    return model, optimizer, events, names


def test_rounds_of_all_buckets_are_in_flight_together() -> None:
    """One round of each bucket in turn: all second rounds are launched before a third one is waited for."""
    model, optimizer, events, names = of_three_rounds(is_prompt=False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.synchronize()
    for name, other in zip(names, names[1:], strict=False):
        assert events.index(("launch", f"{other}.1")) < events.index(("wait", f"{name}.2"))


def test_available_replies_are_used_during_backward() -> None:
    model, optimizer, events, names = of_three_rounds(is_prompt=True)
    nets.loss_of(model, 0).backward()
    assert ("wait", f"{names[0]}.1") in events
    optimizer.step()


def test_buckets_start_in_the_order_in_which_backward_fills_them() -> None:
    """From the second step on. In the first one it is the reverse order of registration."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in ("last", "first")})
    transport, events = recording()
    optimizer = nets.wrap(model, transport, bucket_mb=1e-6)
    names = [plan.bucket.name for plan in optimizer.planned]
    for expected in (names, names[::-1]):
        optimizer.zero_grad()
        events.clear()
        model["last"](model["first"](torch.ones(3, 4))).sum().backward()
        optimizer.step()
        launched = [name.rpartition(".")[0] for event, name in events if event == "launch"]
        assert [name for name in launched if name in names] == expected


CHANGES = {
    "clip": lambda m: clip_grad_norm_(m.parameters(), 0.01, foreach=False),
    "clip, foreach": lambda m: clip_grad_norm_(m.parameters(), 0.01, foreach=True),
    "one gradient": lambda m: m.first.bias.grad.mul_(2),
    "part of one": lambda m: m.last.weight.grad[0].zero_(),
    "replaced": lambda m: setattr(m.first.weight, "grad", m.first.weight.grad * 2),
    "none": lambda m: m.zero_grad(),
}
COMPRESSORS: dict[str, Any] = {
    "dense": DenseCompressor,
    "dgc": partial(nets.dgc, 0.5),
    "powersgd": partial(PowerSGDCompressor, 2),
    "qsgd": QSGDCompressor,
    "int8": TwoPhaseCompressor,
}


def wrapped(model: Any, transport: Any, name: str, bucket_mb: float = SMALL, **options: Any) -> Any:
    make = nets.dgc_sgd if name == "dgc" else nets.momentum_sgd
    return nets.wrap(model, transport, make, compression=COMPRESSORS[name](), bucket_mb=bucket_mb, **options)


CASES = [("dgc", change, mb, zero) for change in CHANGES for mb in (SMALL, 25.0) for zero in ("none", "zero")]
CASES += [(name, "clip", SMALL, "none") for name in COMPRESSORS]


@pytest.mark.parametrize("given", CASES, ids=str)
@nets.each_rank(2)
def test_every_change_in_flight_is_refused_whichever_buckets_have_started(
    model: Any, transport: Any, given: tuple[str, str, float, str]
) -> None:
    name, change, bucket_mb, zero = given
    optimizer = wrapped(model, transport, name, bucket_mb)
    nets.train(model, optimizer, range(2), transport.rank, zero=zero)
    nets.ZEROS[zero](model, optimizer)
    nets.loss_of(model, 2, transport.rank).backward()
    CHANGES[change](model)
    for use in (optimizer.step, optimizer.synchronize):
        with pytest.raises(RuntimeError, match=RECIPE):
            use()


@nets.each_rank(2)
def test_a_change_before_a_bucket_that_starts_in_a_later_backward_is_refused(model: Any, transport: Any) -> None:
    """One of a gradient that backward did not compute is not."""
    optimizer = wrapped(model, transport, "dense")
    optimizer.zero_grad()
    nets.loss_of(model, 0, transport.rank, spare=False).backward()
    model.spare.weight.grad = torch.ones(8, 8)
    model.spare.weight.grad.mul_(3)
    optimizer.synchronize()
    assert torch.equal(model.spare.weight.grad, torch.full((8, 8), 3.0))
    optimizer.close()
    wrapped(model, transport, "dense", bucket_mb=25.0).zero_grad()
    model.first.weight.sum().backward()
    model.first.weight.grad.mul_(2)
    with pytest.raises(RuntimeError, match=rf"first\.weight changed.*{RECIPE}"):
        ones = torch.ones(8)
        (model.first.bias.sum() + model.spare(ones).sum() + model.last(ones).sum()).backward()


@pytest.mark.parametrize("name", COMPRESSORS)
@nets.each_rank(2)
def test_gradients_may_be_clipped_by_the_documented_recipe(model: Any, transport: Any, name: Any) -> None:
    """So may an incomplete sum of gradients (backward_passes_per_step): nothing of it has been sent."""
    optimizer, clip = wrapped(model, transport, name, backward_passes_per_step=2), CHANGES["clip"]
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 1)
        nets.loss_of(model, step, transport.rank).backward()
        clip(model)
        nets.loss_of(model, 10 + step, transport.rank).backward()
        nets.through_gradients(model, optimizer, clip)
    assert not torch.equal(model.first.weight, nets.net().first.weight)


def fail(*_: Any) -> None:
    raise MemoryError("own")


def fail_in_backward(model: Any, layer: str, rank: int) -> None:
    """An exception before the gradient of the layer is computed. `first` has the last gradients."""
    with getattr(model, layer).register_full_backward_pre_hook(fail), pytest.raises(MemoryError):
        nets.loss_of(model, 99, rank).backward()


@pytest.mark.parametrize(("layer", "passes"), [("last", 1), ("first", 1), ("first", 2)])
def test_an_exception_before_a_bucket_has_started_leaves_nothing_after_zero_grad(layer: str, passes: int) -> None:
    def body(model: Any, transport: Any) -> None:
        # one bucket for all: it does not start before the last gradient
        options = {"compression": nets.dgc(0.3), "backward_passes_per_step": passes}
        optimizer = nets.wrap(model, transport, nets.dgc_sgd, **options)
        nets.train(model, optimizer, [0], transport.rank, passes=passes)
        fail_in_backward(model, layer, transport.rank)
        if passes == 1 and layer == "first":
            with pytest.raises(RuntimeError, match=r"ended an earlier backward, call zero_grad\(\)"):
                nets.loss_of(model, 1, transport.rank).backward()
        nets.train(model, optimizer, range(1, 4), transport.rank, passes=passes)

    expected = nets.trained(2, range(4), nets.dgc_sgd, partial(nets.dgc, 0.3), training={"passes": passes})
    nets.assert_same(nets.run(2, body)[0], expected, exactly=True)


@nets.each_rank(2)
def test_after_a_bucket_has_started_the_step_must_be_finished_as_elsewhere(model: Any, transport: Any) -> None:
    optimizer = wrapped(model, transport, "dgc")
    nets.train(model, optimizer, range(3), transport.rank)
    optimizer.zero_grad()
    if transport.rank == 1:
        fail_in_backward(model, "first", transport.rank)
        with pytest.raises(RuntimeError, match=r"After an exception in backward call step\(\) all the same"):
            optimizer.zero_grad()
    else:
        nets.loss_of(model, 3).backward()
    optimizer.step()
    nets.train(model, optimizer, range(4, 6), transport.rank)


def double(p: Any) -> None:
    p.grad.mul_(2)


def test_a_step_that_is_refused_before_it_begins_does_not_count() -> None:
    model = nets.net()
    optimizer = nets.wrap(model, nets.alone())
    hooks = [p.register_post_accumulate_grad_hook(double) for p in model.parameters()]
    with pytest.raises(RuntimeError, match="changed between backward"):
        nets.loss_of(model, 0).backward()
    for hook in hooks:
        hook.remove()
    nets.train(model, optimizer, [0])
    assert optimizer.compression_state_dict()["identity"]["step"] == 1


class FailingCompressor(DenseCompressor):
    where = ""

    def reduce(self, bucket: Any, state: Any) -> Any:
        if self.where and bucket.name.endswith(self.where):
            fail()
        reduced = yield from super().reduce(bucket, state)
        return fail() if self.where == "later" else reduced


def check_that_nothing_continues(model: Any, *uses: Any) -> None:
    before = nets.values(model)
    for use in uses * 2:
        with pytest.raises(RuntimeError, match=BROKEN):
            use()
    assert nets.same(before.values(), nets.values(model).values())


@pytest.mark.parametrize("name", [".0", ".1", "later", "optimizer"])
@nets.each_rank(2)
def test_an_exception_of_a_compressor_or_of_the_wrapped_optimizer(model: Any, transport: Any, name: str) -> None:
    compressor = FailingCompressor()
    optimizer = nets.wrap(model, transport, compression=compressor, bucket_mb=SMALL)
    nets.train(model, optimizer, range(2), transport.rank)
    compressor.where, step = name, optimizer.inner.step
    optimizer.inner.step = fail if name == "optimizer" else step
    with pytest.raises(MemoryError):
        nets.train(model, optimizer, [2], transport.rank)
    compressor.where, optimizer.inner.step = "", step
    check_that_nothing_continues(model, optimizer.zero_grad, optimizer.compression_state_dict, optimizer.step)


ALGORITHMS: dict[str, Any] = {
    "outer steps": lambda: OuterSteps(2, outer=Nesterov()),
    "streaming": lambda: OuterSteps(6, fragment_mb=1e-4, delay=1, compression=top_k()),
    "0/1 Adam": lambda: ZeroOneSteps(2, local_step_scaler=2),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("where", ["optimizer", "exchange"])
@on_ranks(2)
def test_an_exception_in_a_step_with_an_outer_exchange(transport: Any, name: str, where: str) -> None:
    model, algorithm = nets.net(), ALGORITHMS[name]()
    adam = (ZeroOneAdam if name == "0/1 Adam" else torch.optim.Adam)(model.parameters(), lr=0.01)
    optimizer = LocalOptimizer(adam, model.named_parameters(), algorithm, transport=transport)
    nets.train(model, optimizer, range(5), transport.rank)
    owner, attribute = (adam, "step") if where == "optimizer" else (algorithm.exchange._engine, "start")
    setattr(owner, attribute, fail)
    with pytest.raises(MemoryError):
        nets.train(model, optimizer, range(5, 12), transport.rank)
    delattr(owner, attribute)
    uses = (optimizer.synchronize_messages, lambda: optimizer.consensus().__enter__(), optimizer.zero_grad)
    check_that_nothing_continues(model, *uses, optimizer.step, optimizer.compression_state_dict)
