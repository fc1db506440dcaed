"""The samples of each rank, their order, and the data loaders.

Training: every epoch has its own permutation of the data set, drawn from (seed, epoch) only. Rank r takes every
size-th index of it, starting at r. As in the original trainer, the permutation is padded with its own first
indices to a multiple of the number of ranks, so that all ranks take the same number of steps. A smaller last step
is kept if a step is one backward pass, and dropped otherwise. A last step of one sample per rank is dropped too,
because batch norm cannot train on it.

The position in the data is (epoch, steps done in it) and has no other state. Random augmentation is seeded per
pass from (seed, epoch, pass, rank). A run that resumes mid-epoch is therefore identical to one that never stopped,
with any number of workers.

Evaluation: rank r takes test indices [r::size] without padding, so that every sample is evaluated exactly once.
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

# Added to the epoch number of the shuffle for each further pass over the data within an epoch. It is more than the
# number of epochs of any run.
EXTRA_EPOCHS = 1_000_000
MAX_COUNT = 2**31 - 1  # samples of a pass, passes of a step
# More workers per core only cost memory, even if they wait for a slow file system. Each worker counts as two
# processes that import torch: one for training and one for evaluation.
WORKERS_PER_CORE = 8
WORKER_MEMORY = 700 * 10**6


# The data of one step on the device: (inputs, targets) of each backward pass.
Passes = list[tuple[Tensor, Tensor]]


class Pass(NamedTuple):
    """The samples of one backward pass: indices into the data set, and the seed of their augmentation."""

    seed: int
    indices: list[int]


def count_samples(dataset: Dataset[Any]) -> int:
    """Length of a map-style data set."""
    return len(cast(Sized, dataset))


def steps_per_epoch(samples: int, size: int, batch_size: int, num_batches_per_step: int) -> int:
    """Steps that each of `size` ranks takes in an epoch over `samples` samples."""
    own = -(-samples // size)
    steps, rest = divmod(own, batch_size * num_batches_per_step)
    return steps + (1 if num_batches_per_step == 1 and rest > 1 else 0)


class PassSampler(Sampler[Any]):
    """Yields this rank's `Pass` objects of one epoch, beginning at step `start`.

    Set the attributes `epoch` and `start` before iterating.
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
        """This rank's share of the epoch's permutation; it has the same length on every rank."""
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
    """Fetches a whole `Pass`, with the host's random generators seeded from it."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return count_samples(self.dataset)

    def __getitems__(self, wanted: Pass) -> list[Any]:
        with temporary_seed(wanted.seed):
            return [self.dataset[index] for index in wanted.indices]


def check_workers(num_workers: int, local_size: int, cores: int, memory: int | None = None) -> None:
    """Checks that this machine has enough cores and memory for the data workers of its ranks.

    Args:
        num_workers: data.num_workers of each rank.
        local_size: ranks on this machine.
        cores: cores of this machine.
        memory: memory of this machine in bytes; None: as reported by the system.

    Raises:
        ValueError: if there are too many workers.
    """
    memory = memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = max(1, min(WORKERS_PER_CORE * cores, memory // WORKER_MEMORY) // local_size)
    if num_workers > limit:
        raise ValueError(
            f"data.num_workers is {num_workers}: {local_size} rank{'s' * (local_size > 1)} on this machine would "
            f"have {num_workers * local_size} of them. It is at most {limit} here, with {cores} cores and "
            f"{memory / 1e9:.0f} GB; about {max(1, cores // local_size)} is recommended"
        )


def init_worker(worker: int) -> None:
    """Initializes a data worker. It ignores signals to the process group, and it exits when its rank exits.

    A signal must not end it before its rank has saved a checkpoint. Its parent process is the fork server, not the
    rank.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    rank = parent_process()
    assert rank is not None

    def exit_with_rank() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=exit_with_rank, daemon=True, name="exit_with_rank").start()


def worker_options(num_workers: int) -> dict[str, Any]:
    """DataLoader arguments. Workers are not forked, since a fork would copy MPI's locks without its threads."""
    if num_workers == 0:
        return {"num_workers": 0}
    return {
        "num_workers": num_workers,
        "multiprocessing_context": "forkserver",
        "persistent_workers": True,
        "worker_init_fn": init_worker,
    }


class TrainBatches:
    """The training data of this rank, in steps of `num_batches_per_step` passes of `batch_size` samples.

    Raises:
        ValueError: if a number is out of range, or if the data set is too small for one step.
    """

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
            if not 1 <= value <= MAX_COUNT:
                raise ValueError(f"train.{name} is {value}; it must be at least 1 and at most {MAX_COUNT}")
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
            # A loader draws a random number when it starts. Its own generator keeps the run's unchanged.
            generator=torch.Generator(),
            **worker_options(num_workers),
        )

    def epoch(
        self, epoch: int, start: int = 0, more_steps: Callable[[], bool] | None = None
    ) -> Iterator[tuple[int, Passes]]:
        """Yields (step, passes) from step `start` to the end of the epoch.

        If `more_steps` is given, it is called before each step and decides whether the epoch continues. A rank
        that takes more steps than its share of the data has uses its share again, in another order.
        """
        step = start
        passes: Iterator[Any] = iter(())
        while step < self.steps_per_epoch if more_steps is None else more_steps():
            repetition, position = divmod(step, self.steps_per_epoch)
            if step == start or position == 0:
                self.sampler.epoch, self.sampler.start = epoch + repetition * EXTRA_EPOCHS, position
                passes = iter(self.loader)
            yield (
                step,
                [to_device(next(passes), self.device) for _ in range(self.sampler.num_batches_per_step)],
            )
            step += 1


def to_device(batch: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Moves (inputs, targets) to `device`, asynchronously if the memory is pinned."""
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
    """Loader of this rank's share of a test set: indices [rank::size] in order.

    A share may be empty. The lengths of two shares differ by at most one.
    """
    share = Subset(dataset, range(rank, count_samples(dataset), size))
    # An empty share gets no workers, since starting them takes seconds.
    workers = worker_options(num_workers if len(share) else 0)
    return DataLoader(share, batch_size, pin_memory=pin_memory, generator=torch.Generator(), **workers)
