"""The learning rate of every step, compared with the formulas, also after resuming; groups of parameters."""

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim import lr_scheduler as lrs

from dgc_training.schedule import Schedule, inverse_square_root, scale_learning_rate, warmup_factor
from dgc_training.startup.build import parameter_groups

STEPS = 4


def make(
    scheduler: Any = None, size: int = 4, passes: int = 2, warmup: int = 3, per_epoch: bool = True, lr: float = 0.1
) -> Any:
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=lr, momentum=0.9)
    scale_learning_rate(optimizer, passes * size)
    options: Any = {"size": size, "steps_per_epoch": STEPS, "warmup_epochs": warmup, "per_epoch": per_epoch}
    return Schedule(optimizer, scheduler or (lambda scaled: None), **options)


def rates(schedule: Any, epochs: Any, start: Any = (0, 0)) -> Any:
    """The rate of each step, from `start` on."""
    seen = []
    for epoch in range(start[0], epochs):
        for step in range(start[1] if epoch == start[0] else 0, STEPS):
            schedule.begin_step(epoch, step)
            schedule.optimizer.step()
            seen.append(schedule.rates()[0])
    return seen


def test_the_rate_of_every_step() -> None:
    """The scheduler starts after the warm-up: its epoch 0 is epoch 3."""
    seen, scaled = rates(make(), epochs=5), 0.1 * 2 * 4
    warm_up = [scaled * (i / STEPS * (4 - 1) / 3 + 1) / 4 for i in range(3 * STEPS)]
    assert seen == pytest.approx(warm_up + [scaled] * (2 * STEPS)) and seen[0] == pytest.approx(0.1 * 2)
    # one rank never warms up
    assert warmup_factor(0.0, 1, 5) == 1.0
    assert set(rates(make(size=1), epochs=5)) == {0.1 * 2}
    assert set(rates(make(warmup=0), epochs=3)) == {scaled}
    # milestones 2 and 4 are epochs 5 and 7
    seen = rates(make(lambda o: lrs.MultiStepLR(o, [2, 4])), epochs=10)[::STEPS]
    assert seen[3:] == pytest.approx([scaled * factor for factor in (1, 1, 0.1, 0.1, 0.01, 0.01, 0.01)])
    # a cosine per step reaches zero at its end
    cosine = make(lambda o: lrs.CosineAnnealingLR(o, 2 * STEPS - 1), per_epoch=False)
    seen = rates(cosine, epochs=5)[3 * STEPS :]
    assert seen[0] == pytest.approx(0.8) and seen[-1] == pytest.approx(0.0, abs=1e-12)
    assert sorted(seen, reverse=True) == seen
    # a scheduler keeps its low starting rate
    linear = make(lambda o: lrs.LinearLR(o, start_factor=0.25, total_iters=3), warmup=0, size=1, passes=1)
    assert rates(linear, epochs=5)[::STEPS] == pytest.approx([0.1 * factor for factor in (0.25, 0.5, 0.75, 1, 1)])


SCHEDULERS = {
    "none": None,
    "multistep": lambda o: lrs.MultiStepLR(o, [1, 2]),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 5),
    "step": lambda o: lrs.StepLR(o, 2),
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lrs.PolynomialLR(o, 6, 2.0),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.1, 0.5, 3, mode="exp_range", gamma=0.95),
    "linear": lambda o: lrs.LinearLR(o, 0.25, 1.0, 3),
    "inverse square root": lambda o: inverse_square_root(o, 5),
    "onecycle": lambda o: lrs.OneCycleLR(o, max_lr=1.0, total_steps=100),
}


def resume(second: Any, first: Any) -> None:
    """With the state of the first schedule from a file."""
    file = io.BytesIO()
    torch.save({"schedule": first.state_dict(), "optimizer": first.optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    second.optimizer.load_state_dict(state["optimizer"])
    second.load_state_dict(state["schedule"])


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("per_epoch", [True, False])
def test_a_resumed_schedule_continues_identically(name: Any, per_epoch: Any) -> None:
    undisturbed = rates(make(SCHEDULERS[name], per_epoch=per_epoch), epochs=8)
    # In warm-up, at its end, right after a milestone (the checkpoint after epoch 4), and in mid-epoch.
    for at in (2, 3 * STEPS - 1, 3 * STEPS, 3 * STEPS + 1, 4 * STEPS, 5 * STEPS, 5 * STEPS + 3):
        first, before = make(SCHEDULERS[name], per_epoch=per_epoch), []
        for i in range(at):
            first.begin_step(*divmod(i, STEPS))
            first.optimizer.step()
            before.append(first.rates()[0])
        second = make(SCHEDULERS[name], per_epoch=per_epoch)
        resume(second, first)
        assert before + rates(second, epochs=8, start=divmod(at, STEPS)) == undisturbed


@pytest.mark.parametrize("name", ["none", "multistep", "cosine", "inverse square root"])
def test_the_rate_is_rescaled_on_another_number_of_ranks(name: Any) -> None:
    first, second = make(SCHEDULERS[name], size=4), make(SCHEDULERS[name], size=2)
    rates(first, epochs=5)
    resume(second, first)
    expected = rates(make(SCHEDULERS[name], size=2), epochs=8)[5 * STEPS :]
    assert rates(second, epochs=8, start=(5, 0)) == pytest.approx(expected)
    # a run can resume at the first step of an epoch that it has already begun: no step of the scheduler
    first.begin_step(5, 0)
    again = make(SCHEDULERS[name])
    resume(again, first)
    assert rates(again, epochs=8, start=(5, 0)) == rates(make(SCHEDULERS[name]), epochs=8)[5 * STEPS :]


def test_inverse_square_root_rises_to_the_rate_and_falls() -> None:
    """The published settings: from 1e-7 to 5e-4 in 4000 steps."""
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=5e-4)
    factor = inverse_square_root(optimizer).lr_lambdas[0]
    found = [5e-4 * factor(step) for step in (0, 1, 2000, 4000, 16_000, 400_000)]
    assert found == pytest.approx([1e-7, 1e-7 + (5e-4 - 1e-7) / 4000, 2.5005e-4, 5e-4, 2.5e-4, 5e-5])
    assert [inverse_square_root(optimizer, 0).lr_lambdas[0](step) for step in (0, 1, 4)] == [1, 1, 0.5]
    for options, message in (({"warmup_steps": -1}, "warmup_steps is -1"), ({"start": 2.0}, "start is 2.0")):
        with pytest.raises(ValueError, match=message):
            inverse_square_root(optimizer, **options)
    # other schedulers
    for scheduler, message in (
        (lrs.ReduceLROnPlateau, "ReduceLROnPlateau"),
        (type, "not a learning-rate scheduler"),
    ):
        with pytest.raises(ValueError, match=message):
            make(scheduler)
    with pytest.raises(ValueError, match="warmup_lr_epochs"):
        make(warmup=-1)
    with pytest.raises(ValueError, match="another train.scheduler"):
        make().load_state_dict(make(SCHEDULERS["cosine"]).state_dict())


def test_batch_norm_has_a_group_of_its_own() -> None:
    for norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        batch_norm: Any = norm(2)
        model = nn.Sequential(nn.Linear(2, 2), batch_norm, nn.Linear(2, 2))
        assert [len(group["params"]) for group in parameter_groups(model, False)] == [6]
        others, normalization = parameter_groups(model, True)
        assert normalization["weight_decay"] == 0.0
        assert [id(p) for p in normalization["params"]] == [id(batch_norm.weight), id(batch_norm.bias)]
        assert len(others["params"]) == 4 and "weight_decay" not in others
    # shared parameters appear once, and no group is empty
    bn, linear = nn.BatchNorm1d(2), nn.Linear(2, 2)
    groups = parameter_groups(nn.Sequential(linear, bn, linear, bn), True)
    assert [len(group["params"]) for group in groups] == [2, 2]
    SGD(groups, lr=0.1)
    for module, count in ((linear, 1), (bn, 1), (nn.BatchNorm1d(2, affine=False), 0)):
        assert len(parameter_groups(module, True)) == count
    # a layer inside of a batch norm is none
    bn.gate = linear
    others, normalization = parameter_groups(bn, True)
    assert others["params"] == list(linear.parameters()) and len(normalization["params"]) == 2
