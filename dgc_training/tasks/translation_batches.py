"""The sentence pairs of each rank: batches of equally many tokens in training, and each pair once in evaluation.

Training: the batches of all ranks in an epoch, and their order, are drawn from (seed, epoch) only. With n ranks
and b passes per step, step s of rank r has the batches s * n * b + r, s * n * b + n + r, ... of that order. All
ranks take the same number of steps: the last batches of the order, fewer than n * b, are left out of the epoch.
Every other pair is in exactly one batch of one rank. Another epoch leaves other batches out.

The position in the data is (epoch, steps done in it) and has no other state, so a run that resumes mid-epoch is
identical to one that never stopped.

Evaluation: the pairs are sorted by length, and rank r takes [r::size] of them, without padding.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dgc_datasets.translation import SentencePairs, TokenBatches, collate
from dgc_training.random_state import derive_seed

# Added to the epoch number of the shuffle for each further pass over the data within an epoch. It is more than the
# number of epochs of any run.
EXTRA_EPOCHS = 1_000_000


class Batch(NamedTuple):
    """One backward pass: source and target int64 [pairs, tokens], and the target tokens of all ranks."""

    source: Tensor
    target: Tensor
    tokens: int


class TranslationBatches:
    """The training data of this rank, in steps of `num_batches_per_step` batches of at most `max_tokens` tokens.

    Args:
        pairs: the training pairs, the same on every rank.
        max_tokens: as in `TokenBatches`, of each rank's batch.
        num_batches_per_step: passes per step.
        rank: of this process.
        size: number of ranks.
        seed: of the order.
        device: where the batches go.

    Raises:
        ValueError: if there are too few batches for one step, or if a number is out of range.
    """

    def __init__(
        self,
        pairs: SentencePairs,
        max_tokens: int,
        num_batches_per_step: int = 1,
        *,
        rank: int,
        size: int,
        seed: int,
        device: torch.device,
    ) -> None:
        if num_batches_per_step < 1:
            raise ValueError(f"train.num_batches_per_step is {num_batches_per_step}; it must be at least 1")
        self.pairs = pairs
        self.batches = TokenBatches(pairs.lengths, max_tokens)
        self.num_batches_per_step = num_batches_per_step
        self.rank = rank
        self.size = size
        self.seed = seed
        self.device = device
        self.steps_per_epoch = len(self.batches) // (size * num_batches_per_step)
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"the training set has {len(pairs)} pairs in {len(self.batches)} batches of at most {max_tokens} "
                f"tokens, too few for one step of {size} ranks x {num_batches_per_step} passes; lower the tokens "
                "of a batch or train.num_batches_per_step"
            )

    def order(self, epoch: int) -> list[list[int]]:
        """The batches of all ranks in the order of an epoch."""
        return self.batches.epoch(derive_seed(self.seed, epoch))

    def epoch(
        self, epoch: int, start: int = 0, more_steps: Callable[[], bool] | None = None
    ) -> Iterator[tuple[int, list[Batch]]]:
        """Yields (step, batches) from step `start` to the end of the epoch.

        If `more_steps` is given, it is called before each step and decides whether the epoch continues. A rank
        that takes more steps than its share of the data has takes a share of another order.
        """
        step, per_step = start, self.size * self.num_batches_per_step
        order: list[list[int]] = []
        while step < self.steps_per_epoch if more_steps is None else more_steps():
            repetition, position = divmod(step, self.steps_per_epoch)
            if step == start or position == 0:
                order = self.order(epoch + repetition * EXTRA_EPOCHS)
            first = position * per_step
            starts = range(first, first + per_step, self.size)
            yield step, [self._batch(order[start : start + self.size]) for start in starts]
            step += 1

    def _batch(self, of_all_ranks: list[list[int]]) -> Batch:
        source, target = gather(self.pairs, of_all_ranks[self.rank], self.device)
        chosen = [index for batch in of_all_ranks for index in batch]
        return Batch(source, target, int(self.pairs.target_tokens[chosen].sum()))


def gather(pairs: SentencePairs, indices: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """(source, target) of some pairs on `device`, padded."""
    source, target = collate([pairs[index] for index in indices])
    return source.to(device), target.to(device)


def evaluation_batches(pairs: SentencePairs, max_tokens: int, *, rank: int, size: int) -> list[list[int]]:
    """Indices of this rank's share of the pairs, in batches of at most `max_tokens` tokens. It may be empty."""
    order = np.argsort(-pairs.lengths, kind="stable")
    share = order[rank::size]
    batches = TokenBatches(pairs.lengths[share], max(max_tokens, int(pairs.lengths.max())))
    return [share[batch].tolist() for batch in batches.epoch(seed=0)] if len(share) else []
