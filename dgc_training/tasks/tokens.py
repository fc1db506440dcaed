"""Streams of tokens, cut into batches for training and evaluation of a language model.

The target of a token is the next token. A batch is (inputs, targets, begins): int64 [rows, context], and whether
its rows continue nothing, so that a model begins with a state of zeros.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

IGNORED = -100  # a target that does not count; the default of torch's losses


class TokenBatch(NamedTuple):
    """Rows of a stream. inputs, targets: int64 [rows, context]. begins: whether no earlier batch is continued."""

    inputs: Tensor
    targets: Tensor
    begins: bool


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Adjacent windows of a stream; items are (inputs, targets), int64 [context] each.

    Args:
        tokens: [n] of an integer type.
        context: tokens in a window.
    """

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first = index * self.context
        window = self.tokens[first : first + self.context + 1].long()
        return window[:-1], window[1:]


class TokenStreams:
    """Training batches for truncated back-propagation through time: a batch continues the one before.

    The stream is divided into rows of equal length, one for each row of each rank's batch. What is left at its end
    is dropped. An epoch continues the one before. After their last chunk the rows begin again.

    A rank of an asynchronous run takes more or fewer steps in an epoch than `steps_per_epoch`, and the next epoch
    begins at its own place all the same. The chunk there continues nothing, so it has `begins`. `last` is the
    number of the chunk before. A checkpoint has it beside the model's state.

    Args:
        tokens: [n] of an integer type, equal on every rank.
        context: tokens of a row in one backward pass.
        batch_size: rows of one rank.
        num_batches_per_step: backward passes of a step.
        steps_per_epoch: None: one pass over the data.

    Raises:
        ValueError: if the stream is too short for one step.
    """

    def __init__(
        self,
        tokens: Tensor,
        context: int,
        batch_size: int,
        num_batches_per_step: int = 1,
        *,
        rank: int,
        size: int,
        device: torch.device,
        steps_per_epoch: int | None = None,
    ) -> None:
        length = (len(tokens) - 1) // (size * batch_size)
        self.context, self.passes, self.device = context, num_batches_per_step, device
        self.steps = length // (context * num_batches_per_step)  # in one pass over the data
        if self.steps < 1:
            raise ValueError(
                f"the training data has {len(tokens)} tokens, too few for one step of {size} ranks x {batch_size} "
                f"rows x {num_batches_per_step} passes x {context} tokens; lower train.batch_size or task.context"
            )
        self.steps_per_epoch = self.steps if steps_per_epoch is None else steps_per_epoch
        first = rank * batch_size
        rows = [tokens[row * length : (row + 1) * length + 1] for row in range(first, first + batch_size)]
        self.rows = torch.stack(rows)
        self.last: int | None = None  # not known: the state is from the chunk before, if there is one

    def epoch(
        self, epoch: int, start: int = 0, more_steps: Callable[[], bool] | None = None
    ) -> Iterator[tuple[int, list[TokenBatch]]]:
        """Yields (step, batches of its passes) from step `start` to the end of the epoch, as `Batches` says."""
        step = start
        while step < self.steps_per_epoch if more_steps is None else more_steps():
            position = (epoch * self.steps_per_epoch + step) % self.steps
            yield step, [self._chunk(position * self.passes + n) for n in range(self.passes)]
            step += 1

    def _chunk(self, number: int) -> TokenBatch:
        first = number * self.context
        chunk = self.rows[:, first : first + self.context + 1].to(self.device, torch.int64)
        continues = number > 0 and (self.last is None or number == self.last + 1)
        self.last = number
        return TokenBatch(chunk[:, :-1], chunk[:, 1:], not continues)


class EvaluationRows:
    """This rank's share of a test stream. Over all ranks every token but the first is a target exactly once.

    The stream is divided into `rows` adjacent rows on any number of ranks: the result does not depend on it.
    Rank r has the rows [r::size]. The last rows are shorter, or empty: their missing targets are IGNORED.

    Args:
        tokens: [n] of an integer type.
        context: tokens of a row in one batch.
        rows: number of rows on all ranks together.
    """

    def __init__(
        self, tokens: Tensor, context: int, rows: int, *, rank: int, size: int, device: torch.device
    ) -> None:
        count = max(0, len(tokens) - 1)
        length = -(-count // rows)
        inputs = torch.zeros(rows * length, dtype=torch.int64)
        targets = torch.full_like(inputs, IGNORED)
        inputs[:count], targets[:count] = tokens[:count], tokens[1:]
        self.inputs = inputs.view(rows, length)[rank::size]
        self.targets = targets.view(rows, length)[rank::size]
        self.context, self.device = context, device

    def __iter__(self) -> Iterator[TokenBatch]:
        if not len(self.inputs):
            return
        for first in range(0, self.inputs.size(1), self.context):
            columns = slice(first, first + self.context)
            inputs, targets = self.inputs[:, columns], self.targets[:, columns]
            yield TokenBatch(inputs.to(self.device), targets.to(self.device), first == 0)
