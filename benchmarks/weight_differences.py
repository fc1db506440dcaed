"""Time of FSDP2's steps with weights of 8 bits, and with 4-bit differences to the weights that were gathered last.

    python -m benchmarks.weight_differences --hosts 4 --rate 200mbit 1gbit [--repeats 9]

The model has layers of 1024 x 1024, each a group of FSDP2, and one row of input: the network takes nearly all of
the time. Gradients have 4 bits. FSDP2 gathers the weights of a layer in forward and again in backward. Differences
are sent in forward alone, and the weights in full in the first step, which is not measured.

The time of a step is the largest over the ranks, from a barrier to the end of the optimizer's step. `bytes` are
what a rank has sent per parameter and step, by the meter. `gain` is the time with 8 bits over the time, and `of
bytes` is the gain over the ratio of the bytes.
"""

import argparse
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks._harness import Table, in_turns, middle, options, print_json, ratio
from benchmarks._laboratory import Laboratory
from benchmarks._launches import add_options, begin, connected, on_networks, run_ranks
from dgc.comm import all_reduce
from dgc.fsdp import quantize

TAKES = "1 min"
WIDTH = 1024


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """What each rank does."""
    torch.set_num_threads(1)
    transport = connected("torchrun")
    mesh, x = init_device_mesh("cpu", (transport.size,)), torch.randn(1, WIDTH)
    quantizers, works = dict[str, Any](), dict[str, Any]()

    def once(model: nn.Module, optimizer: Any, number: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return 1e3 * (time.perf_counter() - start)

    for weights in (8, 4):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(settings["layers"])))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        name = f"{weights} bits"
        quantizers[name] = quantize(model, 4, weights)
        works[name] = partial(once, model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for step in range(2):
        for name, run in works.items():
            if step:
                quantizers[name].meter.wire_bytes = 0.0
            run(step)
    numel = settings["layers"] * WIDTH * (WIDTH + 1)
    sent = [of.meter.wire_bytes / numel for of in quantizers.values()]
    found = in_turns(works, settings["repeats"], settings["warmup"])
    own = torch.tensor([list(of.values()) for of in found.values()], dtype=torch.float64)
    slowest = all_reduce(transport, own, "max").tolist()
    dist.destroy_process_group()
    return {"ms": dict(zip(found, slowest, strict=True)), "bytes": sent}


def measure_all(args: argparse.Namespace, ranks: int, laboratory: Laboratory | None) -> Any:
    return run_ranks("benchmarks.weight_differences", vars(args), ranks, laboratory, "torchrun")


def report(args: argparse.Namespace, ranks: int, found: dict[str, Any], network: dict[str, Any] | None) -> None:
    """Print a table and a line of JSON."""
    where = "this machine" if network is None else f"{network['hosts']} hosts, {network['rate']}"
    print(f"{ranks} ranks, 1 thread each, {where}, {args.layers} layers, {args.repeats} repeats")
    columns = [("ms", "median ms", "11.1f"), ("least", "least", "9.1f"), ("bytes", "bytes", "8.2f")]
    table = Table("weights", 10, [*columns, ("gain", "gain", "7.2f"), ("share", "of bytes", "10.2f")])
    rows = {name: dict(enumerate(times)) for name, times in found["ms"].items()}
    for (name, row), sent in zip(rows.items(), found["bytes"], strict=True):
        gain = ratio(rows["8 bits"], row)
        numbers = {
            "least": min(row.values()),
            "bytes": sent,
            "gain": gain,
            "share": gain * sent / found["bytes"][0],
        }
        table.add(name, {"ms": middle(row), **numbers})
    print_json({"benchmark": "weight_differences", "ranks": ranks, "network": network, "methods": table.rows})


def main() -> int:
    parser = options("benchmarks.weight_differences", __doc__)
    add_options(parser)
    parser.add_argument("--layers", type=int, default=6)
    parser.set_defaults(warmup=2, repeats=9)
    return on_networks(parser.parse_args(), measure_all, report)


if __name__ == "__main__":
    begin(work, main)
