"""The state of a DistributedOptimizer: saved, loaded, broadcast and gathered, and the epoch of a ratio warm-up."""

import copy
import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from cases import case
from on_ranks import on_ranks
from optim import horovods, nets
from refusals import refuse
from states import assert_equal
from torch import nn

from dgc.comm.collectives import all_gather_object
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DGCCompressor, OneBitAdamCompressor, PowerSGDCompressor
from dgc.contrib import AccordionCompressor
from dgc.core.state import with_tensors
from dgc.optim import OneBitAdam, broadcast_optimizer_state, broadcast_parameters, redistribute


def test_begin_epoch_returns_the_ratio_in_force() -> None:
    optimizer = nets.wrap(nets.net(), nets.alone(), nets.dgc_sgd, compression=nets.dgc(0.001, warmup_epochs=5))
    seen = [optimizer.begin_epoch(epoch) for epoch in (0, 1, 4, 9)]
    assert seen == pytest.approx([0.001**0.2, 0.001**0.4, 0.001, 0.001])
    assert optimizer.compress_ratio == seen[-1]


def test_without_compression_the_ratio_is_one_with_no_residual() -> None:
    dense = nets.wrap(nets.net(), nets.alone())
    assert dense.begin_epoch(0) == 1.0 and dense.error_norm() == 0.0


def test_the_state_of_an_exchange_without_compression_is_refused_by_another() -> None:
    dense = nets.wrap(nets.net(), nets.alone())
    optimizer = nets.wrap(nets.net(), nets.alone(), nets.dgc_sgd, compression=nets.dgc(0.1))
    refuse("other compressors", optimizer.load_compression_state_dict, dense.compression_state_dict())


def test_the_norm_of_the_residual_is_of_all_parameters() -> None:
    model = nets.net()
    optimizer = nets.wrap(model, nets.alone(), nets.dgc_sgd, compression=nets.dgc(0.1))
    nets.train(model, optimizer, [0])
    state = optimizer.compression_state_dict()["DGCCompressor.0"]
    squares = sum(float(v.double().square().sum()) for v in state["velocities"].values())
    assert optimizer.error_norm() == pytest.approx(squares**0.5) and squares > 0


EXACT = partial(nets.dgc, 0.1, sample_ratio=1, warmup_epochs=1)
INTO = [(compression, 25.0) for compression in nets.KINDS.values()] + [(EXACT, mb) for mb in (25.0, 2e-4, 1e-5)]


@pytest.mark.parametrize(("compression", "other_mb"), INTO)
def test_saved_runs_continue_bit_by_bit(compression: Any, other_mb: Any) -> None:
    """Also into other buckets: exact selection acts on each tensor separately."""

    def build(model: Any, transport: Any, mb: Any = 25.0) -> Any:
        optimizer = nets.wrap(model, transport, nets.dgc_sgd, compression=compression(), bucket_mb=mb)
        optimizer.begin_epoch(1)
        return optimizer

    nets.check_that_a_saved_state_goes_on(build, saved=4, again=partial(build, mb=other_mb))


@nets.every_kind
@pytest.mark.parametrize("made", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
@nets.each_rank(2)
def test_copies_of_the_model_are_free_of_hooks(model: Any, transport: Any, compression: Any, made: Any) -> None:
    optimizer = nets.wrap(model, transport, nets.dgc_sgd, compression=compression())
    nets.train(model, optimizer, [0], transport.rank)
    twin = made(model)
    nets.assert_same(twin, model, exactly=True)
    nets.loss_of(twin, 0).backward()
    assert not optimizer._engine.in_flight
    nets.train(model, optimizer, [1], transport.rank)


@nets.every_kind
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, pickle.dumps, lambda optimizer: torch.save(optimizer, io.BytesIO())],
    ids=["deepcopy", "copy", "pickle", "save"],
)
@nets.each_rank(2)
def test_copying_the_optimizer_is_an_error_with_a_cure(
    model: Any, transport: Any, compression: Any, copied: Any
) -> None:
    optimizer = nets.wrap(model, transport, nets.dgc_sgd, compression=compression())
    nets.train(model, optimizer, range(2), transport.rank)
    with pytest.raises(TypeError, match="cannot be copied or pickled: save state_dict"):
        copied(optimizer)


HOROVODS: list[tuple[Any, Any]] = [
    (lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.1), lambda: None),
    (partial(nets.momentum_sgd, weight_decay=0.1, dampening=0.1), lambda: None),
    (partial(nets.dgc_sgd, weight_decay=0.1), lambda: nets.dgc(0.1)),
    (lambda m: OneBitAdam(m.parameters(), freeze_step=2), OneBitAdamCompressor),
    (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), lambda: None),
]


@pytest.mark.parametrize(("make", "compression"), HOROVODS)
def test_horovods_broadcast_of_optimizer_state(make: Any, compression: Any) -> None:
    checkpoints: dict[int, Any] = {}

    def fresh(model: Any, transport: Any) -> None:
        optimizer = nets.wrap(model, transport, make, compression=compression())
        horovods.broadcast_optimizer_state(optimizer, transport)
        nets.assert_same(model, nets.net(), exactly=True)
        assert optimizer.meter.payload_bytes == 0
        nets.train(model, optimizer, range(3), transport.rank)
        states = [model.state_dict(), optimizer.state_dict(), optimizer.compression_state_dict()]
        checkpoints[transport.rank] = copy.deepcopy(states)
        nets.train(model, optimizer, range(3, 6), transport.rank)

    def resumed(model: Any, transport: Any, everywhere: bool) -> None:
        optimizer = nets.wrap(model, transport, make, compression=compression())
        weights, state, errors = copy.deepcopy(checkpoints[transport.rank])
        if everywhere:
            horovods.broadcast_optimizer_state(optimizer, transport)
        if everywhere or transport.rank == 0:
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        if not everywhere:
            broadcast_parameters(model.state_dict(), transport=transport)
            horovods.broadcast_optimizer_state(optimizer, transport)
        optimizer.load_compression_state_dict(errors)
        nets.train(model, optimizer, range(3, 6), transport.rank)

    ends = [nets.trained(2, range(6), make, compression), nets.run(2, fresh)[0]]
    for everywhere in (True, False):
        ends += nets.run(2, partial(resumed, everywhere=everywhere), [nets.net(seed) for seed in range(2)])
    for end in ends[1:]:
        nets.assert_same(end, ends[0], exactly=True)


@on_ranks(3)
def test_broadcast_optimizer_state(transport: Any) -> None:
    model = nets.net(transport.rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (transport.rank + 1))
    if transport.rank == 1:
        nets.loss_of(model, 0).backward()
        optimizer.step()
    broadcast_optimizer_state(optimizer, root=1, transport=transport)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.2 and len(state["state"]) == 6
    assert_equal(*(all_gather_object(transport, state["state"])[rank] for rank in (1, transport.rank)))


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_parameters(root: Any) -> None:
    def build(seed: Any) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3))
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        buffers = {"mask": torch.rand(5) > 0.5, "narrow": torch.rand(3).bfloat16(), "empty": torch.zeros(0)}
        for name, buffer in buffers.items():
            model.register_buffer(name, buffer)
        model[1].num_batches_tracked += seed
        return model

    models, others = [build(seed) for seed in range(3)], [build(7), build(8)]
    expected = {name: t.clone() for name, t in models[root].state_dict().items()}
    LockstepWorld(3).run(lambda t: broadcast_parameters(models[t.rank].state_dict(), root, t))
    LockstepWorld(2).run(lambda t: broadcast_parameters(others[t.rank].named_parameters(), root, transport=t))
    for other in others:
        nets.assert_same(other, build(7 + root), exactly=True)
    for model in models:
        torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


METHODS = ((lambda: DGCCompressor(0.01), nets.dgc_sgd), (lambda: PowerSGDCompressor(rank=2), nets.momentum_sgd))


def wrapped(transport: Any, method: Any, hierarchical: str = "off") -> Any:
    model, (compression, make) = nn.Linear(40, 40), method
    for p in model.parameters():
        nn.init.constant_(p, 0.1)
    return model, nets.wrap(model, transport, make, compression=compression(), hierarchical=hierarchical)


def gathered(world: LockstepWorld, method: Any, hierarchical: str = "off") -> tuple[Any, list[Any]]:
    def body(transport: Any) -> Any:
        model, optimizer = wrapped(transport, method, hierarchical)
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(transport.rank))
        nets.train(model, optimizer, range(2), loss=lambda model, *_: model(x).square().mean())
        return optimizer.gather_state(), optimizer.compression_state_dict()

    whole, states = zip(*world.run(body), strict=True)
    assert [one is None for one in whole] == [False] + [True] * (len(whole) - 1)
    return whole[0], list(states)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("size", "local", "hierarchical"), [(3, 1, "off"), (4, 2, "on")])
def test_each_rank_gets_its_own_gathered_state_back(method: Any, size: int, local: int, hierarchical: str) -> None:
    whole, states = gathered(LockstepWorld(size, local), method, hierarchical)
    read = nets.through_a_file(whole)

    def body(transport: Any) -> Any:
        _, optimizer = wrapped(transport, method, hierarchical)
        optimizer.load_gathered(read if transport.rank == 0 else None)
        return optimizer.compression_state_dict()

    assert_equal(LockstepWorld(size, local).run(body), states)
    if hierarchical == "off":
        assert_equal(LockstepWorld(2).run(body), redistribute(states, 2))


@on_ranks(2)
def test_a_wrong_gathered_state_is_one_error_on_every_rank(transport: Any) -> None:
    for wrong in (None, {}, {"ranks": "all"}, {"ranks": [1]}):
        _, optimizer = wrapped(transport, METHODS[0])
        with case(wrong):
            refuse("load_gathered needs on rank 0 what gather_state", optimizer.load_gathered, wrong)
    value = {"a": torch.ones(1), "b": [(torch.zeros(2), 3)], "c": None}
    assert_equal(with_tensors(torch.neg, value), {"a": -torch.ones(1), "b": [(-torch.zeros(2), 3)], "c": None})


WARM: dict[str, Any] = {"warmup_epochs": 3, "warmup_coeff": [0.5, 0.3, 0.2]}


def advance(model: Any, optimizer: Any, steps: Any, rank: int = 0, **training: Any) -> Any:
    ratios = []
    for step in steps:
        nets.train(model, optimizer, [step], rank, **training)
        ratios.append(optimizer.compress_ratio)
    return ratios


def counting(model: Any, transport: Any, steps_per_epoch: Any = 2, **options: Any) -> Any:
    options = {"compression": nets.dgc(0.1, **WARM), "steps_per_epoch": steps_per_epoch, **options}
    return nets.wrap(model, transport, nets.dgc_sgd, **options)


warm = partial(counting, steps_per_epoch=None)


def test_a_missing_begin_epoch_warns_once() -> None:
    model = nets.net()
    with pytest.warns(UserWarning) as caught:
        advance(model, warm(model, nets.alone()), range(3))
    (said,) = [str(w.message) for w in caught]
    assert all(w in said for w in ("warmup_epochs", "exchange.begin_epoch(epoch)", "steps_per_epoch", "0.5"))


@pytest.mark.parametrize(
    "begin",
    [lambda optimizer, _: optimizer.begin_epoch(0), lambda _, own: own.warmup_compress_ratio(0), None],
    ids=["begin_epoch", "by the compressor", "without a warm-up"],
)
def test_correct_use_of_a_warm_up_does_not_warn(begin: Any) -> None:
    """Warnings are errors in tests. The loop of the original DGC code calls the compressor itself."""
    model, compression = nets.net(), nets.dgc(0.1, **(WARM if begin else {}))
    optimizer = warm(model, nets.alone(), compression=compression)
    if begin:
        begin(optimizer, compression)
    advance(model, optimizer, range(2))


def test_steps_are_counted_into_epochs() -> None:
    def body(model: Any, transport: Any, by_hand: bool) -> None:
        optimizer = (warm if by_hand else counting)(model, transport)
        for epoch, ratio in enumerate((0.5, 0.3, 0.2, 0.1)):
            if by_hand:
                optimizer.begin_epoch(epoch)
            assert advance(model, optimizer, (2 * epoch, 2 * epoch + 1), transport.rank) == [ratio] * 2

    nets.assert_same(*(nets.run(2, partial(body, by_hand=by_hand))[0] for by_hand in (False, True)), exactly=True)


def test_every_kind_of_step_counts_once() -> None:
    model = nets.net()
    optimizer = counting(model, nets.alone(), backward_passes_per_step=2)
    horovods.broadcast_optimizer_state(optimizer, optimizer.transport)  # no step
    ratios = advance(model, optimizer, range(6), passes=2, finish=nets.through_gradients)
    assert ratios == [0.5, 0.5, 0.3, 0.3, 0.2, 0.2]
    dropping = counting(other := nets.net(), nets.alone())
    (nets.loss_of(other, 0) * float("nan")).backward()
    with pytest.warns(UserWarning, match="drops this step"):
        dropping.step()
    assert advance(other, dropping, range(3)) == [0.5, 0.3, 0.3]


def test_a_resumed_run_continues_with_the_ratio() -> None:
    for done, per_epoch, expected in ((3, 2, [0.3, 0.2, 0.2, 0.1]), (4, 2, [0.2, 0.2, 0.1]), (3, 4, [0.3, 0.2])):
        model, again = nets.net(), nets.net()
        optimizer = counting(model, nets.alone())
        advance(model, optimizer, range(done))
        resumed = counting(again, nets.alone(), steps_per_epoch=per_epoch)
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        resumed.load_compression_state_dict(optimizer.compression_state_dict())
        assert resumed.compress_ratio == expected[0]
        ratios = advance(again, resumed, range(done, done + len(expected)))
        if per_epoch == 2:
            assert ratios == expected
            advance(model, optimizer, range(done, done + len(expected)))
            nets.assert_same(model, again, exactly=True)
        else:  # 1.5 epochs are done: two of four steps are left
            assert advance(again, resumed, range(9, 10)) == [0.2] and ratios == [0.3, 0.3]


@pytest.mark.usefixtures("no_type_checks")
def test_what_steps_per_epoch_takes() -> None:
    refuse("begin_epoch.*steps_per_epoch=2", counting(nets.net(), nets.alone()).begin_epoch, 1)
    for wrong in (0, -1, 2.5, "ten", True):
        refuse("steps_per_epoch must be", counting, nets.net(), None, wrong)  # before the transport is started

    # other methods get epochs too
    compression = AccordionCompressor(1, 2, min_compression_rate=0)
    optimizer = nets.wrap(model := nets.net(), nets.alone(), compression=compression, steps_per_epoch=2)
    assert optimizer.compress_ratio > min(advance(model, optimizer, [0] * 7))
