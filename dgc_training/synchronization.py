"""How the ranks of a run stay together, step by step and epoch by epoch.

- With gradient compression all ranks take the same steps at the same time.
- With synchronous gossip all ranks take the same number of steps, but one may be some steps ahead of another.
- With asynchronous gossip ranks have only epochs in common. An epoch ends once all ranks together have taken as
  many steps as an epoch has.

The training loop calls one `Synchronization` in all three cases. It also stops all ranks at the same point after a
signal or a limit of time (`dgc_training.faults.interruption`).
"""

import signal
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from math import inf
from types import TracebackType
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from dgc.comm import Transport, all_gather_object
from dgc.optim import Wrapper
from dgc_training.faults.interruption import Interruption
from dgc_training.tasks.protocol import Batches


class Synchronization:
    """Context manager around the training loop. The methods are collective, except for `metrics`.

    Args:
        optimizer: the distributed optimizer.
        settings: the config's `train`.
        minutes: after which the run saves and stops.
    """

    def __init__(self, optimizer: Wrapper, settings: DictConfig, minutes: float = inf) -> None:
        self.optimizer = optimizer
        self.size = optimizer.transport.size
        self.interruption = Interruption(optimizer.transport, optimizer.max_step_lag, 60 * minutes)
        self.stop_signal: signal.Signals | None = None  # equal on every rank
        self._metric_group = "local" if settings.local else "gossip" if settings.gossip else "compression"

    @property
    def max_step_lag(self) -> int | None:
        """Steps that one rank may be ahead of another; None: any number."""
        return self.optimizer.max_step_lag

    def __enter__(self) -> "Synchronization":
        self.interruption.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.interruption.__exit__(kind, error, trace)

    def steps(self, batches: Batches, epoch: int, start: int) -> Iterator[tuple[int, Sequence[Any]]]:
        """Yields (step, passes) of an epoch from step `start`, until it ends or a signal stops the run."""
        total = self.size * batches.steps_per_epoch * (epoch + 1)
        more_steps = self.optimizer.more_steps(total)
        own_steps = None if more_steps is None else lambda: more_steps() and not self.interruption.received
        for step, passes in batches.epoch(epoch, start, own_steps):
            self.interruption.begin_step()
            yield step, passes
            if self.stop_signal is not None:
                return

    def end_step(self) -> None:
        """Call after each step. Sets `stop_signal` if a signal was received."""
        self.stop_signal = self.interruption.end_step()

    def end_epoch(self) -> bool:
        """Call after the last step of an epoch. Returns False if a signal stopped the run before."""
        if self.stop_signal is None:
            self.optimizer.synchronize_messages()
            if self.max_step_lag is None:  # ranks without common steps check for signals only here
                self.check_signals()
        return self.stop_signal is None

    def check_signals(self) -> None:
        """Sets `stop_signal` if any rank has received a signal. Call it between epochs."""
        self.stop_signal = self.interruption.check()

    def averaged_model(self) -> AbstractContextManager[None]:
        """Context manager in which every rank has the same model: the mean over the ranks if they differ."""
        return self.optimizer.consensus()

    def metrics(self) -> dict[str, float]:
        """The optimizer's metrics of the last step, by TensorBoard tag."""
        return {f"{self._metric_group}/{name}": value for name, value in self.optimizer.metrics().items()}


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the tensor's bytes, in order of its logical indices."""
    return zlib.crc32(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def minority_ranks(checksums: list[int | None]) -> list[int]:
    """The ranks that do not have the most frequent value. In a tie, rank 0's value counts as correct."""
    counts = Counter(checksums)
    most_frequent = max(counts, key=lambda value: (counts[value], value == checksums[0]))
    return [rank for rank, value in enumerate(checksums) if value != most_frequent]


def check_replicas(model: nn.Module, transport: Transport) -> None:
    """Checks that all ranks have equal parameters. Collective.

    Buffers are not compared, since batch norm's statistics differ between ranks.

    Raises:
        RuntimeError: on every rank, with the first parameter that differs and the ranks in the minority.
    """
    own = {name: checksum(parameter.detach()) for name, parameter in model.named_parameters()}
    gathered = all_gather_object(transport, own, name="replicas")
    for name in own:
        wrong = minority_ranks([checksums.get(name) for checksums in gathered])
        if wrong:
            ranks = f"rank {wrong[0]} differs" if len(wrong) == 1 else f"ranks {wrong} differ"
            tie = "" if 2 * len(wrong) < len(gathered) else " (no majority: rank 0's value counts as correct)"
            raise RuntimeError(f"replicas differ: parameter {name} of {ranks} from the other ranks'{tie}")
