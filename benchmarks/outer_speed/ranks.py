"""What each rank of `benchmarks.outer_speed` does. `benchmarks.launches` starts it."""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch

from benchmarks.launches import settings_of_rank, write_result
from benchmarks.train_step.models import CONTEXT, Work, make
from dgc.comm import Transport, all_gather_object, barrier
from dgc.compression import DenseCompressor, FP16Compressor, SparseCompressor
from dgc.compression.protocol import Compressor
from dgc.local import Nesterov, OuterSteps
from dgc.memory import ResidualMemory
from dgc.optim import DistributedOptimizer, LocalOptimizer
from dgc.selection import TopKPerChunk
from dgc.wire import RiceIndices, TwoBitValues

FRAGMENT_MB = 25.0  # of streaming
DENSE = {"dense": DenseCompressor, "fp16": FP16Compressor}
OUTER: dict[str, Callable[[dict[str, Any]], OuterSteps]] = {
    "diloco": lambda settings: OuterSteps(settings["every"] or 50, outer=Nesterov()),
    "sparseloco": lambda settings: OuterSteps(
        settings["every"] or 30, outer=partial(torch.optim.SGD, lr=1.0), compression=sparse()
    ),
    "streaming": lambda settings: streaming(settings),
    "streaming-fp16": lambda settings: streaming(settings, FP16Compressor()),
}


def streaming(settings: dict[str, Any], compression: Compressor | None = None) -> OuterSteps:
    every, delay = settings["every"] or 50, settings["delay"]
    return OuterSteps(
        every, outer=Nesterov(), compression=compression, fragment_mb=FRAGMENT_MB, delay=delay, alpha=0.5
    )


def sparse() -> SparseCompressor:
    """The compressor of configs/local/sparseloco."""
    memory, selector = ResidualMemory(decay=0.95), TopKPerChunk(4096)
    return SparseCompressor(64 / 4096, memory, selector, TwoBitValues(), RiceIndices(), vectors="sparse")


class Trainer:
    """One method with a model of its own.

    Attributes:
        window: Steps of a measurement.
        before: Steps before it, after which no exchange is in flight.
    """

    def __init__(self, name: str, settings: dict[str, Any], transport: Transport):
        self.work: Work = make("lm", settings["batch"], 0, transport.rank)
        named = list(self.work.model.named_parameters())
        self.inner = torch.optim.AdamW([p for _, p in named], lr=1e-4)
        self.optimizer: Any = self.inner
        self.window = self.before = settings["steps"]
        if name in DENSE:
            self.optimizer = DistributedOptimizer(self.inner, named, DENSE[name](), transport=transport)
        elif name in OUTER:
            steps = OUTER[name](settings)
            self.optimizer = LocalOptimizer(self.inner, named, steps, transport=transport)
            # the exchange of the first fragment begins in the last of H steps, and ends `delay` steps later
            self.window, self.before = steps.average_every, steps.average_every + steps.delay

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.work.loss(self.work.model).backward()
            self.optimizer.step()

    def finish(self) -> None:
        """Wait for what is in flight, if an exchange begins in the step in which the one before it ends."""
        if self.optimizer is not self.inner:
            self.optimizer.synchronize_messages()

    def bytes(self) -> float:
        return 0.0 if self.optimizer is self.inner else float(self.optimizer.meter.wire_bytes)

    def close(self) -> None:
        if self.optimizer is not self.inner:
            self.optimizer.close()


def seconds_per_step(trainer: Trainer, count: int, transport: Transport) -> float:
    """Seconds of a step of the slowest rank, as the mean over `count` steps and all that they exchange."""
    barrier(transport)
    start = perf_counter()
    trainer.steps(count)
    trainer.finish()
    return max(all_gather_object(transport, perf_counter() - start)) / count


def measured(name: str, alone: Trainer, settings: dict[str, Any], transport: Transport) -> dict[str, float]:
    """A row of the table."""
    trainer = Trainer(name, settings, transport)
    trainer.steps(trainer.before)
    trainer.finish()
    before = seconds_per_step(alone, settings["steps"], transport)
    count, sent = trainer.window, trainer.bytes()
    own = seconds_per_step(trainer, count, transport)
    sent = trainer.bytes() - sent
    after = seconds_per_step(alone, settings["steps"], transport)
    trainer.close()
    tokens = settings["batch"] * CONTEXT * transport.size
    idle = (before + after) / 2
    return {
        "steps": count,
        "tokens_per_second": tokens / own,
        "alone_tokens_per_second": tokens / idle,
        "share": idle / own,
        "drift": after / before,
        "wire_bytes_per_step": sent / count,
    }


def connected(launcher: str) -> Transport:
    if launcher == "torchrun":
        from dgc.comm import torch_distributed

        return torch_distributed.connect(point_to_point=True)
    from dgc.comm import horovod

    return horovod.connect(point_to_point=True)


def main() -> None:
    settings = settings_of_rank()
    torch.set_num_threads(settings["threads"])
    torch.set_flush_denormal(True)  # a batch that is learned by heart has denormal gradients, which are slow
    transport = connected(settings["launcher"])
    alone = Trainer("alone", settings, transport)
    alone.steps(2)
    rows = {name: measured(name, alone, settings, transport) for name in settings["methods"]}
    if transport.rank == 0:
        parameters = sum(p.numel() for p in alone.work.model.parameters())
        write_result({"parameters": parameters, "methods": rows})


if __name__ == "__main__":
    main()
