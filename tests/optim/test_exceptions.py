"""After an exception that the program catches, an optimizer continues with equal replicas, or refuses to."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import case
from gossip.networks import top_k
from on_ranks import on_ranks
from optim import nets

from dgc.compression import DenseCompressor
from dgc.local import Nesterov, OuterSteps, ZeroOneAdam, ZeroOneSteps
from dgc.optim import LocalOptimizer

SMALL = 1e-4  # MB: several buckets, of which some start during backward
BROKEN = r"an earlier step ended with an exception, MemoryError: own: ranks may have sent"


def fail(*_: Any) -> None:
    raise MemoryError("own")


def fail_in_backward(model: Any, layer: str, rank: int) -> None:
    """An exception before the gradient of the layer is computed. `first` has the last gradients."""
    hook = getattr(model, layer).register_full_backward_pre_hook(fail)
    with pytest.raises(MemoryError):
        nets.loss_of(model, 99, rank).backward()
    hook.remove()


def test_an_exception_before_a_bucket_has_started_leaves_nothing_after_zero_grad() -> None:
    def body(model: Any, transport: Any, layer: str, passes: int) -> None:
        # one bucket for all: it does not start before the last gradient
        options = {"compression": nets.dgc(0.3), "backward_passes_per_step": passes}
        optimizer = nets.wrap(model, transport, nets.dgc_sgd, **options)
        nets.train(model, optimizer, [0], transport.rank, passes=passes)
        fail_in_backward(model, layer, transport.rank)
        if passes == 1 and layer == "first":
            with pytest.raises(RuntimeError, match=r"ended an earlier backward, call zero_grad\(\)"):
                nets.loss_of(model, 1, transport.rank).backward()
        nets.train(model, optimizer, range(1, 4), transport.rank, passes=passes)

    for layer, passes in (("last", 1), ("first", 1), ("first", 2)):
        with case(layer, passes):
            (model, _) = nets.run(2, partial(body, layer=layer, passes=passes))
            expected = nets.trained(2, range(4), nets.dgc_sgd, partial(nets.dgc, 0.3), training={"passes": passes})
            nets.assert_same(model, expected, exactly=True)


@nets.each_rank(2)
def test_after_a_bucket_has_started_the_step_must_be_finished_as_elsewhere(model: Any, transport: Any) -> None:
    optimizer = nets.wrap(model, transport, nets.dgc_sgd, compression=nets.dgc(0.3), bucket_mb=SMALL)
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


def test_a_step_that_is_refused_before_it_begins_does_not_count() -> None:
    model = nets.net()
    optimizer = nets.wrap(model, nets.alone())

    def change(p: Any) -> None:
        p.grad.mul_(2)

    hooks = [p.register_post_accumulate_grad_hook(change) for p in model.parameters()]
    with pytest.raises(RuntimeError, match="changed between backward"):
        nets.loss_of(model, 0).backward()
    for hook in hooks:
        hook.remove()
    nets.train(model, optimizer, [0])
    assert optimizer.compression_state_dict()["identity"]["step"] == 1


class FailingCompressor(DenseCompressor):
    def __init__(self, where: str):
        self.where, self.fails = where, False

    def reduce(self, bucket: Any, state: Any) -> Any:
        if self.fails and bucket.name.endswith(self.where):
            fail()
        reduced = yield from super().reduce(bucket, state)
        if self.fails and self.where == "later":
            fail()
        return reduced


def check_that_nothing_continues(model: Any, uses: list[Any]) -> None:
    before = nets.values(model)
    for use in uses * 2:
        with pytest.raises(RuntimeError, match=BROKEN):
            use()
    assert nets.same(before.values(), nets.values(model).values())


@pytest.mark.parametrize("name", [".0", ".1", "later", "optimizer"])
@on_ranks(2)
def test_an_exception_of_a_compressor_or_of_the_wrapped_optimizer(transport: Any, name: str) -> None:
    model, compressor = nets.net(), FailingCompressor(name)
    optimizer = nets.wrap(model, transport, compression=compressor, bucket_mb=SMALL)
    nets.train(model, optimizer, range(2), transport.rank)
    compressor.fails = True
    step, optimizer.inner.step = optimizer.inner.step, fail if name == "optimizer" else optimizer.inner.step
    with pytest.raises(MemoryError):
        nets.train(model, optimizer, [2], transport.rank)
    compressor.fails, optimizer.inner.step = False, step
    check_that_nothing_continues(model, [optimizer.zero_grad, optimizer.compression_state_dict, optimizer.step])


ALGORITHMS: dict[str, Callable[[], Any]] = {
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
    own = [optimizer.synchronize_messages, lambda: optimizer.consensus().__enter__()]
    uses = [optimizer.zero_grad, optimizer.step, *own, optimizer.compression_state_dict]
    check_that_nothing_continues(model, uses)
