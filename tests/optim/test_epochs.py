"""The epoch of a compressor with a ratio warm-up: set by the training loop, or counted by steps."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from optim.nets import alone, assert_same, dgc, dgc_sgd, loss_of, net, run, through_gradients, train, wrap

from dgc.compression import PowerSGDCompressor

WARM: dict[str, Any] = {"warmup_epochs": 3, "warmup_coeff": [0.5, 0.3, 0.2]}


def advance(model: Any, optimizer: Any, steps: Any, rank: int = 0, **training: Any) -> Any:
    ratios = []
    for step in steps:
        train(model, optimizer, [step], rank, **training)
        ratios.append(optimizer.compress_ratio)
    return ratios


def counting(model: Any, transport: Any, steps_per_epoch: Any = 2, **options: Any) -> Any:
    options = {"compression": dgc(0.1, **WARM), "steps_per_epoch": steps_per_epoch, **options}
    return wrap(model, transport, dgc_sgd, **options)


warm = partial(counting, steps_per_epoch=None)


def test_a_missing_begin_epoch_warns_once_and_correct_use_does_not() -> None:
    """Warnings are errors in tests. The loop of the original DGC code calls the compressor itself."""
    model = net()
    with pytest.warns(UserWarning) as caught:
        advance(model, warm(model, alone()), range(3))
    (said,) = [str(w.message) for w in caught]
    assert all(
        word in said for word in ("warmup_epochs=3", "exchange.begin_epoch(epoch)", "steps_per_epoch", "0.5")
    )
    for begin in (lambda o, c: o.begin_epoch(0), lambda o, c: c.warmup_compress_ratio(0), None):
        model, compression = net(), dgc(0.1, **(WARM if begin else {}))
        optimizer = warm(model, alone(), compression=compression)
        if begin:
            begin(optimizer, compression)
        advance(model, optimizer, range(2))


def test_steps_are_counted_into_epochs() -> None:
    def body(model: Any, transport: Any) -> None:
        optimizer = counting(model, transport)
        assert optimizer.compress_ratio == 0.5
        assert advance(model, optimizer, range(8), transport.rank) == [0.5, 0.5, 0.3, 0.3, 0.2, 0.2, 0.1, 0.1]

    def by_hand(model: Any, transport: Any) -> None:
        optimizer = warm(model, transport)
        for epoch in range(4):
            optimizer.begin_epoch(epoch)
            advance(model, optimizer, range(2 * epoch, 2 * epoch + 2), transport.rank)

    assert_same(run(2, body)[0], run(2, by_hand)[0], exactly=True)


def test_every_kind_of_step_counts_once() -> None:
    model = net()
    optimizer = counting(model, alone(), backward_passes_per_step=2)
    for p in model.parameters():  # as hvd.broadcast_optimizer_state: no step
        p.grad = torch.zeros_like(p)
    optimizer.step()
    ratios = advance(model, optimizer, range(6), passes=2, finish=through_gradients)
    assert ratios == [0.5, 0.5, 0.3, 0.3, 0.2, 0.2]
    dropping = counting(other := net(), alone())
    (loss_of(other, 0) * float("nan")).backward()
    with pytest.warns(UserWarning, match="drops this step"):
        dropping.step()
    assert advance(other, dropping, range(3)) == [0.5, 0.3, 0.3]


def test_a_resumed_run_continues_with_the_ratio() -> None:
    for done, per_epoch, expected in ((3, 2, [0.3, 0.2, 0.2, 0.1]), (4, 2, [0.2, 0.2, 0.1]), (3, 4, [0.3, 0.2])):
        model, again = net(), net()
        optimizer = counting(model, alone())
        advance(model, optimizer, range(done))
        resumed = counting(again, alone(), steps_per_epoch=per_epoch)
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        resumed.load_compression_state_dict(optimizer.compression_state_dict())
        assert resumed.compress_ratio == expected[0]
        ratios = advance(again, resumed, range(done, done + len(expected)))
        if per_epoch == 2:
            assert ratios == expected
            advance(model, optimizer, range(done, done + len(expected)))
            assert_same(model, again, exactly=True)
        else:  # 1.5 epochs are done: two of four steps are left
            assert advance(again, resumed, range(9, 10)) == [0.2] and ratios == [0.3, 0.3]


@pytest.mark.usefixtures("no_type_checks")
def test_what_steps_per_epoch_refuses() -> None:
    with pytest.raises(ValueError, match="begin_epoch.*steps_per_epoch=2"):
        counting(net(), alone()).begin_epoch(1)
    for wrong in (0, -1, 2.5, "ten", True):
        with pytest.raises(ValueError, match="steps_per_epoch must be"):
            counting(net(), None, wrong)  # before the transport is started


def test_other_methods_get_epochs_too() -> None:
    model = net()
    compression = PowerSGDCompressor(1, min_compression_rate=0, high_rank=2)
    optimizer = wrap(model, alone(), compression=compression, steps_per_epoch=2)
    before = optimizer.compress_ratio
    assert min(advance(model, optimizer, [0] * 7)) < before
