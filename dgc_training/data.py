"""Which samples each rank sees, in what order, and the loaders that bring them.

Training: every epoch has its own permutation of the data set, drawn from (seed, epoch) alone; rank r takes
every size-th index of it. As in the original trainer the permutation is filled up from its own beginning to a
multiple of the ranks, so all ranks take the same number of steps; a smaller last step is kept if a step is
one backward pass and dropped otherwise. A step of one sample per rank, which batch norm cannot train on, is
dropped too.

A position is (epoch, steps done in it), nothing else: random augmentation is seeded per pass from (seed,
epoch, pass, rank), so a run goes on in the middle of an epoch as if it had never stopped, with any number of
workers.

Evaluation: rank r takes test indices [r::size], unpadded, so every sample is seen exactly once over the
ranks.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence, Sized
from multiprocessing import parent_process
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from dgc_training.random_state import derive_seed, temporary_seed

LAP = 1_000_000  # more epochs than any run has
MOST = 2**31 - 1  # samples of a pass, passes of a step
# More workers on a core, even ones that wait for a slow file system, only cost memory: each is a process that
# imports torch, and there is one for training and one for evaluation.
WORKERS_PER_CORE = 8
WORKER_MEMORY = 700 * 10**6


class Pass(NamedTuple):
    """One backward pass's samples: indices into the data set, and the seed of their augmentation."""

    seed: int
    indices: list[int]


def count_samples(dataset: Dataset[Any]) -> int:
    """Length of a map-style data set."""
    return len(cast(Sized, dataset))


def steps_per_epoch(samples: int, size: int, batch_size: int, num_batches_per_step: int) -> int:
    """Steps that every one of `size` ranks takes in an epoch over `samples` samples."""
    own = -(-samples // size)
    steps, rest = divmod(own, batch_size * num_batches_per_step)
    return steps + (1 if num_batches_per_step == 1 and rest > 1 else 0)


class PassSampler(Sampler[Any]):
    """Yields this rank's `Pass`es of one epoch, from step `start` on. Set `epoch` and `start` before
    iterating.
    """

    def __init__(
        self, samples: int, batch_size: int, num_batches_per_step: int, *, rank: int, size: int, seed: int
    ) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.num_batches_per_step = num_batches_per_step
        self.rank = rank
        self.size = size
        self.seed = seed
        self.steps = steps_per_epoch(samples, size, batch_size, num_batches_per_step)
        self.epoch = 0
        self.start = 0

    def indices(self) -> list[int]:
        """This rank's share of the epoch's permutation; equally long on every rank."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        order = torch.randperm(self.samples, generator=generator)
        total = -(-self.samples // self.size) * self.size
        padded = order.repeat(-(-total // self.samples))[:total]
        return cast(list[int], padded[self.rank :: self.size].tolist())

    def __iter__(self) -> Iterator[Pass]:
        indices = self.indices()
        for number in range(self.start * self.num_batches_per_step, self.steps * self.num_batches_per_step):
            chosen = indices[number * self.batch_size : (number + 1) * self.batch_size]
            yield Pass(derive_seed(self.seed, self.epoch, number, self.rank), chosen)

    def __len__(self) -> int:
        return (self.steps - self.start) * self.num_batches_per_step


class SeededDataset(Dataset[Any]):
    """Fetches a whole `Pass` with the host's random generators seeded for it."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return count_samples(self.dataset)

    def __getitems__(self, wanted: Pass) -> list[Any]:
        with temporary_seed(wanted.seed):
            return [self.dataset[index] for index in wanted.indices]


def check_workers(num_workers: int, local_size: int, cores: int, memory: int | None = None) -> None:
    """ValueError where the ranks of a machine would start more workers than it has room for.

    Args:
        num_workers: data.num_workers, of each rank.
        local_size: ranks on this machine.
        cores: of this machine.
        memory: of this machine, in bytes; None: what the system says.
    """
    memory = memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = min(WORKERS_PER_CORE * cores, memory // WORKER_MEMORY) // local_size
    if num_workers > max(1, most):
        raise ValueError(
            f"data.num_workers is {num_workers}: {local_size} rank{'s' * (local_size > 1)} on this machine would "
            f"have {num_workers * local_size} of them. It is at most {max(1, most)} here, with {cores} cores and "
            f"{memory / 1e9:.0f} GB; about {max(1, cores // local_size)} serves well"
        )


def begin_worker(worker: int) -> None:
    """In a worker: a signal to the whole process group must not end it before its rank has saved, and it must not
    outlive its rank. (The parent that the kernel knows is the fork server, which waits for its workers.)
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    rank = parent_process()
    assert rank is not None

    def end_with_rank() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=end_with_rank, daemon=True, name="end_with_rank").start()


def worker_options(num_workers: int) -> dict[str, Any]:
    """DataLoader arguments: workers never come from a fork, which would copy MPI's threads and locks
    half-way.
    """
    if num_workers == 0:
        return {"num_workers": 0}
    return {
        "num_workers": num_workers,
        "multiprocessing_context": "forkserver",
        "persistent_workers": True,
        "worker_init_fn": begin_worker,
    }


class TrainBatches:
    """The training data of this rank, as steps of `num_batches_per_step` passes of `batch_size` samples."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        num_batches_per_step: int = 1,
        *,
        rank: int,
        size: int,
        seed: int,
        device: torch.device,
        num_workers: int = 0,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("num_batches_per_step", num_batches_per_step)):
            if not 1 <= value <= MOST:
                raise ValueError(f"train.{name} is {value}; it must be at least 1 and at most {MOST}")
        samples = count_samples(dataset)
        self.sampler = PassSampler(samples, batch_size, num_batches_per_step, rank=rank, size=size, seed=seed)
        self.steps_per_epoch = self.sampler.steps
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"the training set has {samples} samples, too few for one step of {size} ranks x "
                f"{num_batches_per_step} passes x {batch_size} samples; lower train.batch_size"
            )
        self.device = device
        self.loader: DataLoader[Any] = DataLoader(
            SeededDataset(dataset),
            batch_sampler=self.sampler,
            pin_memory=device.type == "cuda",
            # Its own generator: a loader that starts draws a number, which must not disturb the run's.
            generator=torch.Generator(),
            **worker_options(num_workers),
        )

    def epoch(
        self, epoch: int, start: int = 0, more: Callable[[], bool] | None = None
    ) -> Iterator[tuple[int, list[tuple[Tensor, Tensor]]]]:
        """Yields (step, passes) from step `start` to the epoch's end; a pass is (inputs, targets) on the
        device.

        more: asked before each step, in place of counting to the end. A rank that does more steps than its share
        has goes through the share again, in another order.
        """
        goes_on = (lambda step: step < self.steps_per_epoch) if more is None else (lambda step: more())
        passes: Iterator[Any] = iter(())
        step = start
        while goes_on(step):
            lap, place = divmod(step, self.steps_per_epoch)
            if step == start or place == 0:
                # laps have orders of their own, far from those of later epochs
                self.sampler.epoch, self.sampler.start = epoch + lap * LAP, place
                passes = iter(self.loader)
            yield (
                step,
                [to_device(next(passes), self.device) for _ in range(self.sampler.num_batches_per_step)],
            )
            step += 1


def to_device(batch: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """(inputs, targets) moved to `device`, without waiting where the memory is pinned."""
    inputs, targets = batch
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def evaluation_loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    rank: int,
    size: int,
    pin_memory: bool = False,
    num_workers: int = 0,
) -> DataLoader[Any]:
    """This rank's share of a test set: indices [rank::size] in order. It may be empty, and shares may differ
    by one.
    """
    share = Subset(dataset, range(rank, count_samples(dataset), size))
    # No workers for an empty share: starting them costs seconds.
    workers = worker_options(num_workers if len(share) else 0)
    return DataLoader(share, batch_size, pin_memory=pin_memory, generator=torch.Generator(), **workers)
