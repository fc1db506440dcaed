"""Tokens per second of dense training and of outer steps, over a link of a limited rate.

    python -m benchmarks.outer_speed --hosts 2 --rate 100mbit --launcher torchrun

dense, fp16   all-reduce of gradients in every step
diloco        fp32 pseudo-gradients every H = 50 steps, with Nesterov's momentum
sparseloco    64 of each 4096 elements in 2 bits, every H = 30 steps
streaming     DiLoCo in fragments of 25 MB, H = 50; each is used --delay steps after its exchange began;
              streaming-fp16 sends them in 16 bits

Every rank trains the language model of benchmarks.train_step (27 million parameters) with AdamW. A method's window
has H steps after H + delay steps that are not measured, so it has each of its exchanges once, and nothing is in
flight at its ends. Dense methods have --steps steps. Before and after each window, --steps steps run without
communication: `share` is the speed compared with the mean of these two. While the ranks compute, Horovod's thread
polls for messages. With --launcher torchrun Gloo's threads move them, which sleep until there is something to do.
"""

import argparse
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from benchmarks._harness import Table, options, print_json
from benchmarks._laboratory import Laboratory
from benchmarks._launches import LAUNCHERS, add_options, begin, connected, on_networks, run_ranks
from benchmarks.train_step import CONTEXT, Work, make_work
from dgc.comm import Transport, all_gather_object, barrier
from dgc.optim import DistributedOptimizer, LocalOptimizer
from scripts.methods import build

TAKES = "8 min with 100 Mbit/s"
DENSE = ("dense", "fp16")
OUTER = ("diloco", "sparseloco", "streaming", "streaming-fp16")
NAMES = (*DENSE, *OUTER)


class Trainer:
    """One method with a model of its own. It is measured in `window` steps, after the steps `before` them."""

    def __init__(self, name: str, settings: dict[str, Any], transport: Transport):
        self.work: Work = make_work("lm", settings["batch"], 0, transport.rank)
        named = list(self.work.model.named_parameters())
        inner = torch.optim.AdamW([p for _, p in named], lr=1e-4)
        self.wrapper: DistributedOptimizer | LocalOptimizer | None = None
        self.window = self.before = settings["steps"]
        if name in DENSE:
            self.wrapper = DistributedOptimizer(inner, named, build(name), transport=transport)
        elif name in OUTER:
            changes = {"average_every": settings["every"]} if settings["every"] else {}
            if name.startswith("streaming"):
                changes["delay"] = settings["delay"]
            steps = build(name, **changes)
            self.wrapper = LocalOptimizer(inner, named, steps, transport=transport)
            # the exchange of the first fragment begins in the last of H steps, and ends `delay` steps later
            self.window, self.before = steps.average_every, steps.average_every + steps.delay
        self.optimizer = self.wrapper or inner

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.work.loss(self.work.model).backward()
            self.optimizer.step()

    def finish(self) -> None:
        """Wait for what is in flight, if an exchange begins in the step in which the one before it ends."""
        if self.wrapper is not None:
            self.wrapper.synchronize_messages()


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
    count, wrapper = trainer.window, trainer.wrapper
    assert wrapper is not None, name
    sent = wrapper.meter.wire_bytes
    own = seconds_per_step(trainer, count, transport)
    sent = wrapper.meter.wire_bytes - sent
    after = seconds_per_step(alone, settings["steps"], transport)
    wrapper.close()
    tokens, idle = settings["batch"] * CONTEXT * transport.size, (before + after) / 2
    speeds = {"tokens_per_second": tokens / own, "alone_tokens_per_second": tokens / idle}
    return {"steps": count, **speeds, "share": idle / own, "wire_bytes_per_step": sent / count}


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """What each rank does."""
    torch.set_num_threads(settings["threads"])
    torch.set_flush_denormal(True)  # a batch that is learned by heart has denormal gradients, which are slow
    transport = connected(settings["launcher"])
    alone = Trainer("alone", settings, transport)
    alone.steps(2)
    rows = {name: measured(name, alone, settings, transport) for name in settings["methods"]}
    return {"parameters": sum(p.numel() for p in alone.work.model.parameters()), "methods": rows}


def measure_all(args: argparse.Namespace, ranks: int, laboratory: Laboratory | None) -> Any:
    return run_ranks("benchmarks.outer_speed", vars(args), ranks, laboratory, args.launcher)


def report(args: argparse.Namespace, ranks: int, found: dict[str, Any], network: dict[str, Any] | None) -> None:
    """Print a table and a line of JSON."""
    if network is not None:
        reached = f"one TCP connection reaches {network['bits_per_second'] / 1e6:.0f} Mbit/s"
        print(f"{network['hosts']} hosts, {network['rate']} each way: {reached}")
    ranks_and_batch = f"{ranks} ranks under {args.launcher}, batch {args.batch} x 64 tokens per rank"
    print(f"{found['parameters']:,} parameters, {ranks_and_batch}")
    columns = [("steps", "steps", "7d"), ("tokens_per_second", "tokens/s", "11.1f")]
    columns += [("alone_tokens_per_second", "alone", "9.1f"), ("percent", "share %", "9.1f")]
    table = Table("method", 16, [*columns, ("megabytes", "wire MB/step", "14.3f")])
    for name, row in found["methods"].items():
        table.add(name, {**row, "percent": 100 * row["share"], "megabytes": row["wire_bytes_per_step"] / 1e6})
    settings = {"ranks": ranks, "batch": args.batch, "delay": args.delay, "launcher": args.launcher}
    print_json({"benchmark": "outer_speed", **settings, "network": network, **found})


def main(argv: Sequence[str] | None = None) -> int:
    parser = options("benchmarks.outer_speed", __doc__)
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--batch", type=int, default=4, help="sequences of 64 tokens per rank")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--steps", type=int, default=5, help="of a window without exchanges, and of dense methods")
    parser.add_argument("--every", type=int, help="H of all outer steps, instead of their own")
    parser.add_argument("--delay", type=int, default=5, help="of streaming, at most H divided by its 5 fragments")
    over = "mpirun: Horovod and MPI; torchrun: torch.distributed and Gloo"
    parser.add_argument("--launcher", choices=LAUNCHERS, default="mpirun", help=over)
    add_options(parser, steps=False)
    parser.set_defaults(ranks=[2], rate=["100mbit"])
    args = parser.parse_args(argv)
    if min(args.steps, args.batch, args.threads) < 1 or (args.every is not None and args.every < 1):
        parser.error("--steps, --batch, --threads and --every must be at least 1")
    return on_networks(args, measure_all, report)


if __name__ == "__main__":
    begin(work, main)
