"""Order and sharding of the data; the state of all random generators."""

import io
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from environment import patient, python_path
from torch.utils.data import Dataset, TensorDataset

from dgc_training.data import PassSampler, TrainBatches, check_workers, evaluation_loader, steps_per_epoch
from dgc_training.random_state import random_state, restore_random_state, seed_everything, temporary_seed

CPU = torch.device("cpu")


class Noisy(Dataset):
    """Item: (index plus noise in [0, 1), index)."""

    def __init__(self, samples: int = 23) -> None:
        self.samples = samples

    def __len__(self) -> Any:
        return self.samples

    def __getitem__(self, index: Any) -> Any:
        return index + torch.rand(()), index


def sampler(rank: Any, size: Any, samples: int = 23, batch_size: int = 3, passes: int = 1, seed: int = 7) -> Any:
    return PassSampler(samples, batch_size, passes, rank=rank, size=size, seed=seed)


STEPS = {  # of this many samples, ranks, samples of a batch and passes
    (1437, 4, 32, 1): 12,  # 360 each: 11 full steps and one of 8
    (1437, 4, 32, 2): 5,  # the rest is dropped where a step is several passes
    (50_000, 8, 128, 1): 49,
    (96, 3, 32, 1): 1,
    (97, 3, 32, 1): 1,  # 33 each: a last step of one sample is dropped
    (5, 4, 8, 1): 1,
    (5, 4, 8, 2): 0,
}


def test_number_of_steps() -> None:
    assert {sizes: steps_per_epoch(*sizes) for sizes in STEPS} == STEPS


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_ranks_together_use_all_samples_in_equal_steps(size: int) -> None:
    samplers = [sampler(rank, size) for rank in range(size)]
    for epoch in (0, 1):
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
    # more ranks than samples
    shares = [sampler(rank, 5, samples=2).indices() for rank in range(5)]
    assert [len(share) for share in shares] == [1] * 5 and {i for s in shares for i in s} == {0, 1}


def test_the_order_depends_only_on_seed_and_epoch() -> None:
    torch.manual_seed(0)
    first, second, other = sampler(0, 2), sampler(0, 2), sampler(0, 2, seed=8)
    a = list(first)
    torch.manual_seed(1)
    assert a == list(second)
    second.epoch = 1
    orders = [[index for p in s for index in p.indices] for s in (first, second, other)]
    assert all(orders[i] != orders[j] for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("passes", [1, 2])
def test_a_position_suffices_to_resume(passes: Any) -> None:
    def batches() -> Any:
        return TrainBatches(Noisy(), 3, passes, rank=1, size=2, seed=7, device=CPU)

    state = torch.get_rng_state()
    whole = [(step, [x for x, _ in step_passes]) for step, step_passes in batches().epoch(2)]
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(3)
    rest = [(step, [x for x, _ in step_passes]) for step, step_passes in batches().epoch(2, start=1)]
    assert [step for step, _ in rest] == [step for step, _ in whole[1:]]
    for (_, expected), (_, seen) in zip(whole[1:], rest, strict=True):
        assert len(seen) == passes and all(torch.equal(a, b) for a, b in zip(expected, seen, strict=True))


def test_augmentation_differs_between_epochs_and_ranks() -> None:
    def noise(rank: Any, epoch: Any) -> Any:
        batches = TrainBatches(Noisy(), 3, rank=rank, size=2, seed=7, device=CPU)
        return torch.cat([x - y for _, [(x, y)] in batches.epoch(epoch)])

    for rank, epoch in ((0, 1), (1, 0)):
        assert (noise(0, 0) - noise(rank, epoch)).abs().max() > 0.01  # by more than rounding


def test_too_little_data_is_an_error() -> None:
    with pytest.raises(ValueError, match="too few for one step of 4 ranks x 2 passes x 8 samples"):
        TrainBatches(Noisy(5), 8, 2, rank=0, size=4, seed=0, device=CPU)
    with pytest.raises(ValueError, match="train.batch_size is 0"):
        TrainBatches(Noisy(5), 0, rank=0, size=1, seed=0, device=CPU)


def test_evaluation_covers_every_sample_once() -> None:
    for samples, size in ((10, 1), (10, 3), (2, 5)):
        dataset = TensorDataset(torch.arange(samples), torch.arange(samples))
        loaders = [evaluation_loader(dataset, 2, rank=rank, size=size) for rank in range(size)]
        seen = [int(y) for loader in loaders for _, targets in loader for y in targets]
        assert sorted(seen) == list(range(samples))


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


def test_workers_are_not_forked_change_no_data_and_end_with_their_rank(tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text(WORKERS)
    words, pipe = [sys.executable, str(tmp_path / "workers.py")], subprocess.PIPE
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
    assert not left and method == ["forkserver"]
    dataset = TensorDataset(torch.arange(64.0), torch.arange(64))
    batches = TrainBatches(dataset, 4, rank=0, size=1, seed=7, device=CPU)
    assert values == [str(int(y)) for _, [(_, targets)] in batches.epoch(0) for y in targets]


def test_too_many_workers_are_an_error() -> None:
    message = r"num_workers is 500: 2 ranks on this machine would have 1000 .* at most 32 .* 8 cores and 64 GB"
    with pytest.raises(ValueError, match=message):
        check_workers(500, local_size=2, cores=8, memory=64 * 10**9)
    with pytest.raises(ValueError, match="at most 5 .* 64 cores and 4 GB"):
        check_workers(6, local_size=1, cores=64, memory=4 * 10**9)
    for workers, size, cores, memory in ((0, 8, 1, 10**9), (8, 1, 1, 16 * 10**9), (32, 2, 8, 64 * 10**9)):
        check_workers(workers, size, cores, memory)


# Random generators


def draw() -> Any:
    """Of normal variables too: of these, two generators keep every second one for later."""
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


def test_all_generators_continue() -> None:
    seed_everything(5)
    first = draw()
    file = io.BytesIO()
    torch.save(random_state(CPU), file)
    expected = [draw() for _ in range(3)]
    seed_everything(5)
    assert draw() == first
    file.seek(0)
    restore_random_state(torch.load(file, weights_only=True), CPU)
    assert [draw() for _ in range(3)] == expected


def test_a_temporary_seed_is_that_of_all_generators_and_leaves_them_alone() -> None:
    seed_everything(5)
    expected = draw()
    seed_everything(5)
    drawn = []
    for seed in (1, 1, 2):
        with temporary_seed(seed):
            drawn.append(draw())
    assert drawn[0] == drawn[1] and not {*drawn[0][:4]} & {*drawn[2][:4]}
    assert draw() == expected
