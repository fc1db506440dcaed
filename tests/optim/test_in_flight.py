"""Gradients must not change between backward and step(), because they may have been sent already."""

from functools import partial
from typing import Any

import pytest
import torch
from cases import case
from optim.nets import dgc, dgc_sgd, each_rank, loss_of, momentum_sgd, run, through_gradients, train, wrap
from torch.nn.utils import clip_grad_norm_

from dgc.compression import DenseCompressor, PowerSGDCompressor, QSGDCompressor, TwoPhaseCompressor

RECIPE = r"call optimizer\.synchronize\(\) first, then clip, then step\(\) inside optimizer\.skip_synchronize\(\)"
SMALL = 1e-4  # MB: several buckets, of which some start during backward


def replace(model: Any) -> None:
    model.first.weight.grad = model.first.weight.grad * 2


CHANGES = {
    "clip": lambda m: clip_grad_norm_(m.parameters(), 0.01, foreach=False),
    "clip, foreach": lambda m: clip_grad_norm_(m.parameters(), 0.01, foreach=True),
    "one gradient": lambda m: m.first.bias.grad.mul_(2),
    "part of one": lambda m: m.last.weight.grad[0].zero_(),
    "replaced": replace,
    "none": lambda m: m.zero_grad(),
}


COMPRESSORS: dict[str, Any] = {
    "dense": DenseCompressor,
    "dgc": partial(dgc, 0.5),
    "powersgd": partial(PowerSGDCompressor, 2),
    "qsgd": QSGDCompressor,
    "int8": TwoPhaseCompressor,
}


def wrapped(model: Any, transport: Any, name: str, **options: Any) -> Any:
    make = dgc_sgd if name == "dgc" else momentum_sgd
    return wrap(model, transport, make, compression=COMPRESSORS[name](), **{"bucket_mb": SMALL, **options})


def test_every_change_in_flight_is_refused_whichever_buckets_have_started() -> None:
    cases = [("dgc", change, mb, zero) for change in CHANGES for mb in (SMALL, 25.0) for zero in ("none", "zero")]
    cases += [(name, "clip", SMALL, "none") for name in COMPRESSORS]

    def body(model: Any, transport: Any, name: str, change: str, bucket_mb: float, zero: str) -> None:
        def refused(model: Any, optimizer: Any) -> None:
            CHANGES[change](model)
            for use in (optimizer.step, optimizer.synchronize):
                with pytest.raises(RuntimeError, match=RECIPE):
                    use()

        optimizer = wrapped(model, transport, name, bucket_mb=bucket_mb)
        train(model, optimizer, range(2), transport.rank, zero=zero)
        train(model, optimizer, [2], transport.rank, zero=zero, finish=refused)

    for name, change, bucket_mb, zero in cases:
        with case(name, change, bucket_mb, zero):
            run(2, partial(body, name=name, change=change, bucket_mb=bucket_mb, zero=zero))


@each_rank(2)
def test_a_change_before_a_bucket_that_starts_in_a_later_backward_is_refused(model: Any, transport: Any) -> None:
    """One of a gradient that backward did not compute is not."""
    optimizer = wrapped(model, transport, "dense")
    optimizer.zero_grad()
    loss_of(model, 0, transport.rank, spare=False).backward()
    model.spare.weight.grad = torch.ones(8, 8)
    model.spare.weight.grad.mul_(3)
    optimizer.synchronize()
    assert torch.equal(model.spare.weight.grad, torch.full((8, 8), 3.0))
    optimizer.close()
    optimizer = wrapped(model, transport, "dense", bucket_mb=25.0)
    optimizer.zero_grad()
    model.first.weight.sum().backward()
    model.first.weight.grad.mul_(2)
    with pytest.raises(RuntimeError, match=rf"first\.weight changed.*{RECIPE}"):
        ones = torch.ones(8)
        (model.first.bias.sum() + model.spare(ones).sum() + model.last(ones).sum()).backward()


@pytest.mark.parametrize("name", COMPRESSORS)
@each_rank(2)
def test_the_documented_recipe_and_partial_sums_may_be_clipped(model: Any, transport: Any, name: Any) -> None:
    """An incomplete sum of gradients (backward_passes_per_step) may change: nothing of it has been sent."""

    def clip(model: Any) -> None:
        clip_grad_norm_(model.parameters(), 0.1)

    optimizer, before = wrapped(model, transport, name, backward_passes_per_step=2), model.first.weight.clone()
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 1)
        loss_of(model, step, transport.rank).backward()
        clip(model)
        loss_of(model, 10 + step, transport.rank).backward()
        through_gradients(model, optimizer, clip)
    assert not torch.equal(model.first.weight, before)
