"""Order of the data, random generators, evaluation over ranks, learning rates and groups of parameters."""

import math
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from environment import patient, python_path
from omegaconf import OmegaConf
from on_ranks import on_ranks
from optim.nets import alone, through_a_file
from refusals import check_refusals, refuse
from states import assert_equal
from torch import nn
from torch.optim import SGD
from torch.optim import lr_scheduler as lrs
from torch.utils.data import Dataset, TensorDataset

from dgc.comm.lockstep import LockstepWorld
from dgc_training.data import PassSampler, TrainBatches, check_workers, evaluation_loader, steps_per_epoch
from dgc_training.evaluation import Evaluation, averaged_batch_norm, batch_norm_buffers, evaluate
from dgc_training.meters import TopKClassMeter
from dgc_training.random_state import random_state, restore_random_state, seed_everything, temporary_seed
from dgc_training.schedule import Schedule, inverse_square_root, scale_learning_rate, warmup_factor
from dgc_training.startup.build import parameter_groups

CPU, STEPS = torch.device("cpu"), 4
SCHEDULERS: dict[str, Any] = {
    "none": None,
    "step": lambda o: lrs.StepLR(o, 2),
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "multistep": lambda o: lrs.MultiStepLR(o, [1, 2]),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 5),
    "polynomial": lambda o: lrs.PolynomialLR(o, 6, 2.0),
    "linear": lambda o: lrs.LinearLR(o, 0.25, 1.0, 3),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.1, 0.5, 3, mode="exp_range", gamma=0.95),
    "inverse square root": lambda o: inverse_square_root(o, 5),
    "onecycle": lambda o: lrs.OneCycleLR(o, max_lr=1.0, total_steps=100),
}


class Noisy(TensorDataset):
    """Item: (index plus noise in [0, 1), index)."""

    def __getitem__(self, index: Any) -> Any:
        return index + torch.rand(()), index


NOISY, FIVE = Noisy(torch.arange(23)), TensorDataset(torch.arange(5))


def sampler(rank: Any, size: Any, samples: int = 23, batch_size: int = 3, passes: int = 1, seed: int = 7) -> Any:
    return PassSampler(samples, batch_size, passes, rank=rank, size=size, seed=seed)


def batches(dataset: Dataset, *args: Any, rank: int = 0, size: int = 1, **options: Any) -> TrainBatches:
    return TrainBatches(dataset, *args, rank=rank, size=size, seed=7, device=CPU, **options)


def test_number_of_steps() -> None:
    steps = {  # of this many samples, ranks, samples of a batch and passes
        (1437, 4, 32, 1): 12,  # 360 each: 11 full steps and one of 8
        (1437, 4, 32, 2): 5,  # the rest is dropped where a step is several passes
        (50_000, 8, 128, 1): 49,
        (96, 3, 32, 1): 1,
        (97, 3, 32, 1): 1,  # 33 each: a last step of one sample is dropped
        (5, 4, 8, 1): 1,
        (5, 4, 8, 2): 0,
    }
    assert {sizes: steps_per_epoch(*sizes) for sizes in steps} == steps
    check_refusals(
        (lambda: batches(FIVE, 8, 2, size=4), "too few for one step of 4 ranks x 2 passes x 8 samples"),
        (lambda: batches(FIVE, 0), "train.batch_size is 0"),
    )


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_ranks_use_all_samples_in_equal_steps(size: int, epoch: int) -> None:
    samplers = [sampler(rank, size) for rank in range(size)]
    for s in samplers:
        s.epoch = epoch
    passes = [[p.indices for p in s] for s in samplers]
    assert {len(p) for p in passes} == {samplers[0].steps}
    for together in zip(*passes, strict=True):
        assert len({len(indices) for indices in together}) == 1
    shares = [s.indices() for s in samplers]
    assert len({len(share) for share in shares}) == 1
    seen = [index for share in shares for index in share]
    assert set(seen) == set(range(23)) and len(seen) < 23 + size


def test_each_of_more_ranks_than_samples_has_one() -> None:
    shares = [sampler(rank, 5, samples=2).indices() for rank in range(5)]
    assert [len(share) for share in shares] == [1] * 5 and {i for s in shares for i in s} == {0, 1}


def test_the_order_of_samples_depends_on_the_seed_of_the_run_alone() -> None:
    torch.manual_seed(0)
    first, second = sampler(0, 2), sampler(0, 2)
    a = list(first)
    torch.manual_seed(1)
    assert a == list(second)


def test_each_epoch_of_each_seed_has_an_order_of_its_own() -> None:
    first, second, other = sampler(0, 2), sampler(0, 2), sampler(0, 2, seed=8)
    second.epoch = 1
    orders = [[index for p in s for index in p.indices] for s in (first, second, other)]
    assert all(orders[i] != orders[j] for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("passes", [1, 2])
def test_a_position_suffices_to_resume(passes: int) -> None:
    def inputs(start: int) -> Any:
        found = batches(NOISY, 3, passes, rank=1, size=2).epoch(2, start)
        return [(step, torch.stack([x for x, _ in step_passes])) for step, step_passes in found]

    state, whole = torch.get_rng_state(), inputs(0)
    assert torch.equal(state, torch.get_rng_state()) and len(whole[0][1]) == passes
    torch.rand(3)
    assert_equal(inputs(1), whole[1:])

    # augmentation differs between epochs and ranks
    def noise(rank: int, epoch: int) -> Any:
        return torch.cat([x - y for _, [(x, y)] in batches(NOISY, 3, rank=rank, size=2).epoch(epoch)])

    for rank, epoch in ((0, 1), (1, 0)):
        assert (noise(0, 0) - noise(rank, epoch)).abs().max() > 0.01  # by more than rounding


WORKERS = """
import torch
from torch.utils.data import TensorDataset
from dgc_training.data import TrainBatches
if __name__ == "__main__":
    dataset = TensorDataset(torch.arange(64.0), torch.arange(64))
    batches = TrainBatches(dataset, 4, rank=0, size=1, seed=7, device=torch.device("cpu"), num_workers=2)
    print(batches.loader.multiprocessing_context.get_start_method())
    print(*(int(y) for _, [(_, targets)] in batches.epoch(0) for y in targets))
    next(batches.epoch(1))
    print(*(worker.pid for worker in batches.loader._iterator._workers), flush=True)
    input()
"""


@pytest.fixture(scope="module")
def killed_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str], list[Path]]:
    """How a rank started its workers, what it read from them, and workers that are left after it was killed."""
    folder = tmp_path_factory.mktemp("workers")
    (folder / "workers.py").write_text(WORKERS)
    words, pipe = [sys.executable, str(folder / "workers.py")], subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with subprocess.Popen(words, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        method, values, pids = (process.stdout.readline().split() for _ in range(3))
        workers = [Path(f"/proc/{pid}") for pid in pids]
        assert len(workers) == 2 and all(worker.exists() for worker in workers)
        process.kill()
    limit = time.monotonic() + patient(60)
    while (left := [worker for worker in workers if worker.exists()]) and time.monotonic() < limit:
        time.sleep(0.05)
    for worker in left:
        os.kill(int(worker.name), signal.SIGKILL)
    return method, values, left


Killed = tuple[list[str], list[str], list[Path]]


def test_workers_are_not_forked(killed_rank: Killed) -> None:
    assert killed_rank[0] == ["forkserver"]


def test_workers_change_no_data(killed_rank: Killed) -> None:
    expected = batches(TensorDataset(torch.arange(64.0), torch.arange(64)), 4)
    assert killed_rank[1] == [str(int(y)) for _, [(_, targets)] in expected.epoch(0) for y in targets]


def test_workers_end_with_their_rank(killed_rank: Killed) -> None:
    assert killed_rank[2] == []


@pytest.mark.parametrize(
    ("count", "size", "cores", "memory", "message"),
    [
        (
            500,
            2,
            8,
            64,
            r"num_workers is 500: 2 ranks on this machine would have 1000 .* at most 32 .* 8 cores and 64",
        ),
        (6, 1, 64, 4, "at most 5 .* 64 cores and 4 GB"),
    ],
)
def test_too_many_workers_are_refused(count: int, size: int, cores: int, memory: int, message: str) -> None:
    refuse(message, check_workers, count, local_size=size, cores=cores, memory=memory * 10**9)


@pytest.mark.parametrize(("count", "size", "cores", "memory"), [(0, 8, 1, 1), (8, 1, 1, 16), (32, 2, 8, 64)])
def test_workers_that_fit_into_the_machine_are_accepted(count: int, size: int, cores: int, memory: int) -> None:
    check_workers(count, size, cores, memory * 10**9)


def draw() -> Any:
    """Of normal variables too: of these, two generators keep every second one for later."""
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


def test_all_generators_continue() -> None:
    seed_everything(5)
    draw()
    state = through_a_file(random_state(CPU))
    expected = [draw() for _ in range(3)]
    seed_everything(6)
    restore_random_state(state, CPU)
    assert [draw() for _ in range(3)] == expected


def test_a_temporary_seed_leaves_the_generators_alone() -> None:
    seed_everything(5)
    first = draw()
    seed_everything(5)
    drawn = []
    for seed in (1, 1, 2):
        with temporary_seed(seed):
            drawn.append(draw())
    assert drawn[0] == drawn[1] and not {*drawn[0][:4]} & {*drawn[2][:4]} and draw() == first


def make_meters(split: Any) -> Any:
    return {f"acc/{split}_top1": TopKClassMeter(1), f"acc/{split}_top5": TopKClassMeter(5)}


def test_results_do_not_depend_on_the_ranks() -> None:
    # every sample is covered once
    for samples, size in ((10, 1), (10, 3), (2, 5)):
        dataset = TensorDataset(torch.arange(samples), torch.arange(samples))
        loaders = [evaluation_loader(dataset, 2, rank=rank, size=size) for rank in range(size)]
        seen = [int(y) for loader in loaders for _, targets in loader for y in targets]
        assert sorted(seen) == list(range(samples))
    model = nn.Identity()

    def body(transport: Any, dataset: Any) -> Any:
        split, loader = ("test", "val"), partial(evaluation_loader, dataset, 2, rank=transport.rank)
        return evaluate(model, {name: loader(size=transport.size) for name in split}, make_meters, transport, CPU)

    for samples, size in product((1, 7, 20), (1, 2, 3, 5)):
        generator = torch.Generator().manual_seed(samples)
        inputs = torch.randn(samples, 10, generator=generator)
        targets = torch.randint(10, (samples,), generator=generator)
        top1 = 100.0 * (inputs.argmax(1) == targets).sum().item() / samples
        for results in LockstepWorld(size).run(partial(body, dataset=TensorDataset(inputs, targets))):
            assert list(results) == ["acc/test_top1", "acc/test_top5", "acc/val_top1", "acc/val_top5"]
            assert results["acc/test_top1"] == results["acc/val_top1"] == top1
            assert results["acc/test_top5"] >= top1
    assert LockstepWorld(2).run(lambda transport: evaluate(model, {}, make_meters, transport, CPU)) == [{}, {}]
    # the mode of the model is restored
    loader = evaluation_loader(TensorDataset(torch.randn(1, 2), torch.zeros(1).long()), 1, rank=0, size=1)
    for training in (True, False):
        norm = nn.BatchNorm1d(2).train(training)
        evaluate(norm, {"test": loader}, make_meters, alone(), CPU)
        assert norm.training is training


@on_ranks(3)
def test_batch_norm_is_averaged_only_inside_the_context(transport: Any) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(2)), nn.Linear(2, 2))
    for buffer in batch_norm_buffers(model).values():
        buffer.fill_(float(transport.rank))
    with averaged_batch_norm(model, transport):
        inside = torch.cat([b.clone() for b in batch_norm_buffers(model).values()])
    outside = torch.cat(list(batch_norm_buffers(model).values()))
    assert inside.shape == (10,) and (inside == 1).all() and (outside == transport.rank).all()
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2, track_running_stats=False))
    assert list(batch_norm_buffers(model)) == ["0.running_mean", "0.running_var"]
    assert set(batch_norm_buffers(nn.BatchNorm1d(3))) == {"running_mean", "running_var"}


@pytest.mark.parametrize(("metric", "lower"), [("acc/test", False), ("perplexity/test", True), (None, False)])
def test_the_meter_of_the_metric_says_whether_lower_is_better(metric: str | None, lower: bool) -> None:
    accuracy = {"_target_": "dgc_training.meters.TopKClassMeter", "k": 1}
    meters = {"acc/{}": accuracy, "perplexity/{}": {"_target_": "dgc_training.meters.Perplexity"}}
    settings = OmegaConf.create({"metric": metric, "meters": meters})
    assert Evaluation({"test": []}, settings, alone(), CPU).lower_is_better is lower


@pytest.mark.parametrize(("k", "correct"), [(1, 2), (2, 3), (3, 4), (5, 4)])
def test_top_k_accuracy_counts_targets_among_the_k_largest(k: int, correct: int) -> None:
    outputs = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.4, 0.35, 0.25]])
    targets = torch.tensor([1, 1, 0, 0])
    meter = TopKClassMeter(k)
    assert meter.data() == {"num_examples": 0, "num_correct": 0} and math.isnan(meter.compute())
    meter.update(outputs[:3], targets[:3])
    meter.update(outputs[3:], targets[3:])
    assert meter.compute() == 25.0 * correct
    assert meter.data() == {"num_examples": 4, "num_correct": correct}


def test_top_k_accuracy_takes_the_sums_of_all_ranks() -> None:
    meter = TopKClassMeter(1)
    meter.set({"num_examples": 8.0, "num_correct": 2.0})
    assert meter.compute() == 25.0


def test_top_0_accuracy_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TopKClassMeter(0)


def make(scheduler: Any = None, size: int = 4, passes: int = 2, warmup: int = 3, per_epoch: bool = True) -> Any:
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    scale_learning_rate(optimizer, passes * size)
    options: Any = {"size": size, "steps_per_epoch": STEPS, "warmup_epochs": warmup, "per_epoch": per_epoch}
    return Schedule(optimizer, scheduler or (lambda scaled: None), **options)


def rates(schedule: Any, epochs: int, start: int = 0, stop: int | None = None) -> Any:
    seen = []
    for step in range(start, epochs * STEPS if stop is None else stop):
        schedule.begin_step(*divmod(step, STEPS))
        schedule.optimizer.step()
        seen.append(schedule.rates()[0])
    return seen


def test_the_rate_of_every_step() -> None:
    """The scheduler starts after the warm-up: its epoch 0 is epoch 3."""
    seen, scaled = rates(make(), epochs=5), 0.1 * 2 * 4
    warm_up = [scaled * (i / STEPS * (4 - 1) / 3 + 1) / 4 for i in range(3 * STEPS)]
    assert seen == pytest.approx(warm_up + [scaled] * (2 * STEPS)) and seen[0] == pytest.approx(0.1 * 2)
    # one rank never warms up
    assert warmup_factor(0.0, 1, 5) == 1.0 and set(rates(make(size=1), epochs=5)) == {0.1 * 2}
    assert set(rates(make(warmup=0), epochs=3)) == {scaled}
    # milestones 2 and 4 are epochs 5 and 7
    seen = rates(make(lambda o: lrs.MultiStepLR(o, [2, 4])), epochs=10)[::STEPS]
    assert seen[3:] == pytest.approx([scaled * factor for factor in (1, 1, 0.1, 0.1, 0.01, 0.01, 0.01)])
    # a cosine per step reaches zero at its end
    seen = rates(make(lambda o: lrs.CosineAnnealingLR(o, 2 * STEPS - 1), per_epoch=False), epochs=5)[3 * STEPS :]
    assert seen[0] == pytest.approx(0.8) and seen[-1] == pytest.approx(0.0, abs=1e-12)
    assert sorted(seen, reverse=True) == seen
    # a scheduler keeps its low starting rate
    linear = make(lambda o: lrs.LinearLR(o, start_factor=0.25, total_iters=3), warmup=0, size=1, passes=1)
    assert rates(linear, epochs=5)[::STEPS] == pytest.approx([0.1 * factor for factor in (0.25, 0.5, 0.75, 1, 1)])


def resume(second: Any, first: Any) -> None:
    """With the state of the first schedule from a file."""
    optimizer, schedule = through_a_file([first.optimizer.state_dict(), first.state_dict()])
    second.optimizer.load_state_dict(optimizer)
    second.load_state_dict(schedule)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("per_epoch", [True, False])
def test_a_resumed_schedule_continues(name: Any, per_epoch: Any) -> None:
    undisturbed = rates(make(SCHEDULERS[name], per_epoch=per_epoch), epochs=8)
    # In warm-up, at its end, right after a milestone (the checkpoint after epoch 4), and in mid-epoch.
    for at in (2, 3 * STEPS - 1, 3 * STEPS, 3 * STEPS + 1, 4 * STEPS, 5 * STEPS, 5 * STEPS + 3):
        first, second = (make(SCHEDULERS[name], per_epoch=per_epoch) for _ in range(2))
        before = rates(first, epochs=8, stop=at)
        resume(second, first)
        assert before + rates(second, epochs=8, start=at) == undisturbed


@pytest.mark.parametrize("name", ["none", "multistep", "cosine", "inverse square root"])
def test_the_rate_is_rescaled_on_another_number_of_ranks(name: Any) -> None:
    first, second, again = (make(SCHEDULERS[name], size=size) for size in (4, 2, 4))
    rates(first, epochs=5)
    resume(second, first)
    expected = rates(make(SCHEDULERS[name], size=2), epochs=8)[5 * STEPS :]
    assert rates(second, epochs=8, start=5 * STEPS) == pytest.approx(expected)
    # a run can resume at the first step of an epoch that it has already begun: no step of the scheduler
    first.begin_step(5, 0)
    resume(again, first)
    assert rates(again, epochs=8, start=5 * STEPS) == rates(make(SCHEDULERS[name]), epochs=8)[5 * STEPS :]


def test_inverse_square_root_falls_after_its_warm_up() -> None:
    """The published settings: from 1e-7 to 5e-4 in 4000 steps."""
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=5e-4)
    factor = inverse_square_root(optimizer).lr_lambdas[0]
    found = [5e-4 * factor(step) for step in (0, 1, 2000, 4000, 16_000, 400_000)]
    assert found == pytest.approx([1e-7, 1e-7 + (5e-4 - 1e-7) / 4000, 2.5005e-4, 5e-4, 2.5e-4, 5e-5])
    assert [inverse_square_root(optimizer, 0).lr_lambdas[0](step) for step in (0, 1, 4)] == [1, 1, 0.5]


def test_schedules_that_cannot_be_are_refused() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=5e-4)
    check_refusals(
        (lambda: inverse_square_root(optimizer, warmup_steps=-1), "warmup_steps is -1"),
        (lambda: inverse_square_root(optimizer, start=2.0), "start is 2.0"),
        (lambda: make(lrs.ReduceLROnPlateau), "ReduceLROnPlateau"),
        (lambda: make(type), "not a learning-rate scheduler"),
        (lambda: make(warmup=-1), "warmup_lr_epochs"),
        (lambda: make().load_state_dict(make(SCHEDULERS["cosine"]).state_dict()), "another train.scheduler"),
    )


def test_batch_norm_has_a_group_of_its_own() -> None:
    for norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        batch_norm: Any = norm(2)
        model = nn.Sequential(nn.Linear(2, 2), batch_norm, nn.Linear(2, 2))
        assert [len(group["params"]) for group in parameter_groups(model, False)] == [6]
        others, normalization = parameter_groups(model, True)
        assert normalization == {"params": [batch_norm.weight, batch_norm.bias], "weight_decay": 0.0}
        assert len(others["params"]) == 4 and "weight_decay" not in others
    # shared parameters appear once, and no group is empty
    bn, linear = nn.BatchNorm1d(2), nn.Linear(2, 2)
    groups = parameter_groups(nn.Sequential(linear, bn, linear, bn), True)
    assert [len(group["params"]) for group in groups] == [2, 2]
    for module, count in ((linear, 1), (bn, 1), (nn.BatchNorm1d(2, affine=False), 0)):
        assert len(parameter_groups(module, True)) == count
    # a layer inside of a batch norm is none
    bn.gate = linear
    others, normalization = parameter_groups(bn, True)
    assert others["params"] == list(linear.parameters()) and len(normalization["params"]) == 2
