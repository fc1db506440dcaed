"""Time of FSDP2's steps with weights of 8 bits, and with 4-bit differences to the weights that were gathered last.

    python -m benchmarks.weight_differences --hosts 4 --rate 200mbit 1gbit [--repeats 9]

The model has layers of 1024 x 1024, each a group of FSDP2, and one row of input: the network takes nearly all of
the time. Gradients have 4 bits. FSDP2 gathers the weights of a layer in forward and again in backward. Differences
are sent in forward alone, and the weights in full in the first step, which is not measured.

The time of a step is the largest over the ranks, from a barrier to the end of the optimizer's step. `bytes` are
what a rank has sent per parameter and step, by the meter. `gain` is the time with 8 bits over the time, and `of
bytes` is the gain over the ratio of the bytes.

`wire` is the time that a host's link needs for these bytes. `computing` is the CPU time of all ranks in a step,
over the number of cores that they share. `nothing sent` are FSDP2's steps with collectives that copy a rank's own
part alone: what FSDP2 and the layers compute without a network and without rounding.
"""

import argparse
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks._harness import Table, in_turns, middle, options, print_json, ratio
from benchmarks._laboratory import Laboratory, parse_rate
from benchmarks._launches import add_options, begin, connected, on_networks, run_ranks
from benchmarks.train_step import Gathered, Reduced
from dgc.comm import TrafficMeter, Transport, all_reduce
from dgc.fsdp import quantize
from scripts.launch import usable_cores

TAKES = "1 min"
WIDTH = 1024
ROWS = {"8 bits": 8, "4 bits": 4, "nothing sent": None}  # bits of weights


def send_nothing(model: nn.Module, transport: Transport) -> TrafficMeter:
    meter = TrafficMeter()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Gathered("fsdp-noop", meter, transport))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(Reduced("fsdp-noop", meter, transport))  # type: ignore[arg-type]
    return meter


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """What each rank does."""
    torch.set_num_threads(1)
    transport = connected("torchrun")
    mesh, x = init_device_mesh("cpu", (transport.size,)), torch.randn(1, WIDTH)
    meters, works = dict[str, TrafficMeter](), dict[str, Any]()

    def once(model: nn.Module, optimizer: Any, number: int) -> tuple[float, float]:
        dist.barrier()
        start, computed = time.perf_counter(), time.process_time()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return 1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - computed)

    for name, weights in ROWS.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(settings["layers"])))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        meters[name] = send_nothing(model, transport) if weights is None else quantize(model, 4, weights).meter
        works[name] = partial(once, model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for step in range(2):
        for name, run in works.items():
            if step:
                meters[name].wire_bytes = 0.0
            run(step)
    numel = settings["layers"] * WIDTH * (WIDTH + 1)
    sent = [meter.wire_bytes / numel for meter in meters.values()]
    found = in_turns(works, settings["repeats"], settings["warmup"])
    own = torch.tensor([list(of.values()) for of in found.values()], dtype=torch.float64)
    slowest = all_reduce(transport, own[..., 0].contiguous(), "max").tolist()
    computed = all_reduce(transport, own[..., 1].median(1).values, "sum").tolist()
    dist.destroy_process_group()
    return {
        "ms": dict(zip(found, slowest, strict=True)),
        "bytes": sent,
        "numel": numel,
        "computing": [ms / min(usable_cores(), transport.size) for ms in computed],
    }


def measure_all(args: argparse.Namespace, ranks: int, laboratory: Laboratory | None) -> Any:
    return run_ranks("benchmarks.weight_differences", vars(args), ranks, laboratory, "torchrun")


def report(args: argparse.Namespace, ranks: int, found: dict[str, Any], network: dict[str, Any] | None) -> None:
    """Print a table and a line of JSON."""
    where = "this machine" if network is None else f"{network['hosts']} hosts, {network['rate']}"
    print(f"{ranks} ranks, 1 thread each, {where}, {args.layers} layers, {args.repeats} repeats")
    columns = [("ms", "median ms", "11.1f"), ("least", "least", "9.1f"), ("computing", "computing", "11.1f")]
    columns += [("wire", "wire", "9.1f"), ("bytes", "bytes", "8.2f"), ("gain", "gain", "7.2f")]
    table = Table("weights", 14, [*columns, ("share", "of bytes", "10.2f")])
    rows = {name: dict(enumerate(times)) for name, times in found["ms"].items()}
    of_eight = found["bytes"][list(rows).index("8 bits")]
    for (name, row), sent, computing in zip(rows.items(), found["bytes"], found["computing"], strict=True):
        numbers = {"ms": middle(row), "least": min(row.values()), "computing": computing, "bytes": sent}
        if network is not None:
            numbers["wire"] = 8e3 * sent * found["numel"] * args.ranks_per_host / parse_rate(network["rate"])
        if ROWS[name] is not None:
            gain = ratio(rows["8 bits"], row)
            numbers |= {"gain": gain, "share": gain * sent / of_eight}
        table.add(name, numbers)
    print_json({"benchmark": "weight_differences", "ranks": ranks, "network": network, "methods": table.rows})


def main() -> int:
    parser = options("benchmarks.weight_differences", __doc__)
    add_options(parser)
    parser.add_argument("--layers", type=int, default=6)
    parser.set_defaults(warmup=2, repeats=9)
    return on_networks(parser.parse_args(), measure_all, report)


if __name__ == "__main__":
    begin(work, main)
