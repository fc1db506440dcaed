"""Gradients must not change between backward and step(), because they may have been sent already."""

from typing import Any

import pytest
import torch
from optim.nets import assert_same, dgc, dgc_sgd, loss_of, momentum_sgd, net, run, wrap
from torch.nn.utils import clip_grad_norm_

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DenseCompressor, PowerSGDCompressor, QSGDCompressor

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
COMPRESSORS = {
    "dense": lambda: DenseCompressor(),
    "dgc": lambda: dgc(0.5),
    "powersgd": lambda: PowerSGDCompressor(2),
    "qsgd": lambda: QSGDCompressor(),
}


def make(name: Any) -> Any:
    return dgc_sgd if name == "dgc" else momentum_sgd


def test_every_change_in_flight_is_refused_whichever_buckets_have_started() -> None:
    cases = [("dgc", change, mb, keep) for change in CHANGES for mb in (SMALL, 25.0) for keep in (True, False)]
    cases += [(name, "clip", SMALL, True) for name in COMPRESSORS]
    for name, change, bucket_mb, set_to_none in cases:

        def body(
            transport: Any,
            name: Any = name,
            change: Any = change,
            bucket_mb: Any = bucket_mb,
            set_to_none: Any = set_to_none,
        ) -> None:
            model = net()
            optimizer = wrap(model, transport, make(name), compression=COMPRESSORS[name](), bucket_mb=bucket_mb)
            for step in range(3):
                optimizer.zero_grad(set_to_none)
                loss_of(model, step, transport.rank).backward()
                if step == 2:
                    CHANGES[change](model)
                    with pytest.raises(RuntimeError, match=RECIPE):
                        optimizer.step()
                    with pytest.raises(RuntimeError, match=RECIPE):
                        optimizer.synchronize()
                else:
                    optimizer.step()

        LockstepWorld(2).run(body)


def test_a_change_before_a_bucket_that_starts_in_a_later_backward_is_refused() -> None:
    def body(transport: Any) -> None:
        model = net()
        optimizer = wrap(model, transport, compression=DenseCompressor())
        optimizer.zero_grad()
        model.first.weight.sum().backward()
        model.first.weight.grad.mul_(2)
        with pytest.raises(RuntimeError, match=rf"first\.weight changed.*{RECIPE}"):
            ones = torch.ones(8)
            (model.first.bias.sum() + model.spare(ones).sum() + model.last(ones).sum()).backward()

    LockstepWorld(2).run(body)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_the_documented_recipe_and_partial_sums_may_be_clipped(name: Any) -> None:
    """An incomplete sum of gradients (backward_passes_per_step) may change: nothing of it has been sent."""

    def body(model: Any, transport: Any) -> None:
        options = {"compression": COMPRESSORS[name](), "bucket_mb": SMALL, "backward_passes_per_step": 2}
        optimizer = wrap(model, transport, make(name), **options)
        for step in range(3):
            optimizer.zero_grad(set_to_none=step == 1)
            loss_of(model, step, transport.rank).backward()
            clip_grad_norm_(model.parameters(), 0.1)
            loss_of(model, 10 + step, transport.rank).backward()
            optimizer.synchronize()
            clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()

    before = net()
    models = run(2, body)
    with pytest.raises(AssertionError):
        assert_same(models[0], before)


def test_a_gradient_that_backward_did_not_compute_may_change() -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = wrap(model, transport, compression=DenseCompressor(), bucket_mb=SMALL)
        optimizer.zero_grad()
        loss_of(model, 0, transport.rank, spare=False).backward()
        model.spare.weight.grad = torch.ones(8, 8)
        model.spare.weight.grad.mul_(3)
        optimizer.synchronize()
        assert torch.equal(model.spare.weight.grad, torch.full((8, 8), 3.0))

    run(2, body)
