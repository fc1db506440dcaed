"""Time and error of a mean of gradients in 16 bits: two phases with sums in fp32, and torch's bf16 hook of DDP.

    python -m benchmarks.sixteen_bits --hosts 4 --rate 200mbit 1gbit [--repeats 7]

The model has the parameters of ResNet-18 with 1000 classes (11.7 million), and its backward pass does no
arithmetic: DDP and its hook take nearly all of the time. Gradients are normal numbers, other ones on each rank.

no hook              DDP's all-reduce of fp32
torch, bf16          bf16_compress_hook of torch.distributed, an all-reduce in bf16
two phases           TwoPhaseCompressor(bits=16)
two phases, 12 MB    the same in buckets of at most 12 MB, in place of 25 MB, so that more of the work is hidden
two phases, random   with stochastic rounding

The time of a step is the largest over the ranks, from a barrier to the end of backward. `error` is the L2 norm of
the difference to the mean in fp64, divided by the norm of that mean.

The last rows have the network alone, with the bytes of all parameters in 16 bits at one time: the all-reduce of
torch's hook, the two rounds of ours, and Gloo's own collectives in place of the messages of `exchange_parts`.
`wire` is the time that a host's link needs for the bytes: for 2 (N - 1) / N of them in an all-reduce, half of it
in a round.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks._harness import Table, in_turns, middle, options, print_json, ratio
from benchmarks._laboratory import Laboratory, parse_rate
from benchmarks._launches import add_options, begin, connected, on_networks, run_ranks
from benchmarks.ddp_step import Given, torch_bf16
from dgc.comm import Transport, all_reduce
from dgc.comm.torch_distributed import exchange_parts
from dgc.compression import TwoPhaseCompressor
from dgc.ddp import compress

TAKES = "2 min"


def hooks(transport: Transport) -> dict[str, Callable[[DistributedDataParallel], Any]]:
    def own(bucket_mb: float | None = None, **settings: Any) -> Callable[[DistributedDataParallel], Any]:
        compressor = TwoPhaseCompressor(16, **settings)
        return lambda model: compress(model, compressor, transport=transport, bucket_mb=bucket_mb)

    found = {"no hook": lambda model: None, "torch, bf16": torch_bf16}
    return {**found, "two phases": own(), "two phases, 12 MB": own(12), "two phases, random": own(random=True)}


def rounds_of_network(numel: int, rank: int, size: int) -> dict[str, Callable[[], None]]:
    """What waits for one collective over the default group of DDP."""
    group: Any = dist.group.WORLD
    halves = torch.zeros(-(-numel // size) * size, dtype=torch.bfloat16)
    sent = halves.view(torch.uint8).view(size, -1)
    arrived = torch.zeros_like(sent)

    def all_to_all() -> None:
        for message in exchange_parts(arrived.unbind(), sent.unbind(), group, tag=0):
            message.wait()

    def all_gather() -> None:
        for message in exchange_parts(arrived.unbind(), [sent[rank]] * size, group, tag=1):
            message.wait()

    return {
        "all-reduce, bf16": lambda: dist.all_reduce(halves),
        "all-to-all": all_to_all,
        "all-to-all of Gloo": lambda: dist.all_to_all_single(arrived.view(-1), sent.view(-1)),
        "all-gather": all_gather,
        "all-gather of Gloo": lambda: dist.all_gather_single(arrived.view(-1), sent[rank]),
    }


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """What each rank does."""
    torch.set_num_threads(1)
    transport = connected("torchrun")
    generator = torch.Generator().manual_seed(transport.rank)
    models: dict[str, DistributedDataParallel] = {}
    for name, register in hooks(transport).items():
        models[name] = DistributedDataParallel(Given())
        register(models[name])
    gradients = [torch.randn(p.shape, generator=generator) for p in models[name].parameters()]
    exact = torch.cat([g.double().flatten() for g in gradients])
    dist.all_reduce(exact)
    exact /= transport.size

    def once(model: DistributedDataParallel, number: int) -> float:
        model.zero_grad()
        loss = model([g.clone() for g in gradients])
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        return 1e3 * (time.perf_counter() - start)

    def error(model: DistributedDataParallel) -> float:
        found: list[Tensor] = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
        return float((torch.cat(found) - exact).norm() / exact.norm())

    def once_alone(collective: Callable[[], None], number: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        collective()
        return 1e3 * (time.perf_counter() - start)

    works: dict[str, Callable[[int], float]] = {name: partial(once, model) for name, model in models.items()}
    for name, collective in rounds_of_network(exact.numel(), transport.rank, transport.size).items():
        works[name] = partial(once_alone, collective)
    found = in_turns(works, settings["repeats"], settings["warmup"])
    own = torch.tensor([list(of.values()) for of in found.values()], dtype=torch.float64)
    slowest = all_reduce(transport, own, "max").tolist()
    errors = {name: error(model) for name, model in models.items()}
    dist.destroy_process_group()
    return {"ms": dict(zip(found, slowest, strict=True)), "error": errors, "numel": exact.numel()}


def measure_all(args: argparse.Namespace, ranks: int, laboratory: Laboratory | None) -> Any:
    return run_ranks("benchmarks.sixteen_bits", vars(args), ranks, laboratory, "torchrun")


def report(args: argparse.Namespace, ranks: int, found: dict[str, Any], network: dict[str, Any] | None) -> None:
    """Print a table and a line of JSON."""
    where = "this machine" if network is None else f"{network['hosts']} hosts, {network['rate']}"
    print(f"{ranks} ranks, 1 thread each, {where}, {args.repeats} repeats; torch {torch.__version__}")
    columns = [("ms", "median ms", "11.1f"), ("least", "least", "9.1f"), ("wire", "wire", "9.1f")]
    columns += [("ratio", "/ torch, bf16", "15.2f"), ("error", "error", "11.2e")]
    table = Table("16 bits", 20, columns)
    rows = {name: dict(enumerate(times)) for name, times in found["ms"].items()}
    for name, row in rows.items():
        numbers = {"ms": middle(row), "least": min(row.values())}
        if network is not None:
            bytes_of_round = 2 * found["numel"] * args.ranks_per_host * (ranks - 1) / ranks
            rounds = 1 if name.startswith(("all-to-all", "all-gather")) else 4 if name == "no hook" else 2
            numbers["wire"] = 8e3 * rounds * bytes_of_round / parse_rate(network["rate"])
        if name in found["error"]:
            numbers |= {"ratio": ratio(row, rows["torch, bf16"]), "error": found["error"][name]}
        table.add(name, numbers)
    print_json({"benchmark": "sixteen_bits", "ranks": ranks, "network": network, "methods": table.rows})


def main() -> int:
    parser = options("benchmarks.sixteen_bits", __doc__)
    add_options(parser)
    parser.set_defaults(warmup=2, repeats=7)
    return on_networks(parser.parse_args(), measure_all, report)


if __name__ == "__main__":
    begin(work, main)
