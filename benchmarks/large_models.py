"""Bytes and time of one step's exchange for large models, by their shapes: Transformer-big beside ResNet-50.

    python -m benchmarks.large_models [--models resnet50 transformer-big] [--methods dense "dgc 0.1 %" powersgd-4]

transformer-big    configs/wmt16/big.py (Vaswani et al. 2017): 209,125,376 parameters, 837 MB
resnet50           torchvision's (He et al. 2016): 25,557,032 parameters, 102 MB

Ranks are simulated in one process. One bucket of 25 MB, or one larger tensor, takes all its steps before the next
one begins, so that the states of two ranks fit into little memory. Gradients are those of benchmarks.compressors.

payload    bytes that one rank contributes per step, by the meter
wire       bytes that one rank sends per step; factor below a dense fp32 all-reduce
encode     milliseconds until the first message is ready; decode: the rest, including orthonormalization. Both are
           those of rank 0, as sums over the buckets of the medians over the steps after a warm-up
ns         nanoseconds of both per parameter

The last line of the output is JSON, after a table.
"""

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

import dgc_datasets.torchvision_compat  # noqa: F401  (before torchvision)
from benchmarks.compressors import METHODS, Clock, Gradients, timed
from benchmarks.results import print_json
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.meter import all_reduce_wire_bytes
from dgc.compression import Route, Rule
from dgc.engine.buckets import keep_states, plan_buckets
from dgc_models import transformer_big
from dgc_training.config import load

MODELS = ("resnet50", "transformer-big")
DEFAULT = ["dense", "fp16", "dgc 0.1 %", "powersgd-2", "powersgd-4"]


def parameters_of(model: str) -> list[tuple[str, Tensor]]:
    """The parameters of a model by name, without memory."""
    with torch.device("meta"):
        if model == "resnet50":
            from torchvision import models

            return list(models.resnet50().named_parameters())
        vocabulary = load(["configs/wmt16/base.py", "configs/wmt16/big.py"]).dataset.vocabulary_size
        return list(transformer_big(vocabulary=vocabulary).named_parameters())


def groups(named: Sequence[tuple[str, Tensor]], method: str) -> list[list[tuple[str, Tensor]]]:
    """The parameters of each bucket, in the order of the model."""
    compressor = METHODS[method]()
    planned = plan_buckets(named, Route([Rule(compressor)]).compressor_for, 25.0, "bucket")
    return [[pair for pair in named if pair[0] in {s.name for s in plan.bucket.segments}] for plan in planned]


def measure(
    named: Sequence[tuple[str, Tensor]], method: str, size: int, steps: int, warmup: int
) -> dict[str, float]:
    """Bytes of a step, and milliseconds of rank 0."""
    found = {"payload_bytes": 0.0, "wire_bytes": 0.0, "encode_ms": 0.0, "decode_ms": 0.0}
    for group in groups(named, method):
        real = [(name, torch.zeros(p.shape, device="cpu")) for name, p in group]
        ranks = []
        for rank in range(size):
            (plan,) = plan_buckets(real, Route([Rule(METHODS[method]())]).compressor_for, 1e6, "bucket")
            keep_states([plan], size, rank)
            ranks.append(plan)
        world, gradients = LockstepWorld(size), Gradients([ranks[0].bucket], size)
        clocks = []
        for step in range(warmup + steps):
            for plan, gradient in zip(ranks, gradients.of(step, 0), strict=True):
                plan.bucket.flat.copy_(gradient)
            own = [Clock() for _ in ranks]
            world.converse(
                "bucket",
                [timed(plan.states.reduce(plan.bucket), clock) for plan, clock in zip(ranks, own, strict=True)],
            )
            clocks.append(own[0])
        found["payload_bytes"] += world.meters[0].payload_bytes / (warmup + steps)
        found["wire_bytes"] += world.meters[0].wire_bytes / (warmup + steps)
        found["encode_ms"] += 1e3 * median(clock.encode for clock in clocks[warmup:])
        found["decode_ms"] += 1e3 * median(clock.decode for clock in clocks[warmup:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=DEFAULT)
    parser.add_argument("--ranks", type=int, default=2, help="2 or more")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after --warmup")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks: one rank sends nothing")
    torch.set_num_threads(args.threads)
    result: dict[str, dict[str, Any]] = {model: {} for model in args.models}
    shapes = {model: parameters_of(model) for model in args.models}
    for model, named in shapes.items():
        print(f"{model}: {sum(p.numel() for _, p in named):,} parameters")
    print(f"{args.ranks} ranks, threads per rank: {args.threads}")
    heads = f"{'payload':>14}{'wire':>14}{'fewer':>8}{'encode':>9}{'decode':>9}{'ns':>7}"
    print(f"\n{'':<14}{'':<18}{heads}")
    for method in args.methods:
        for model, named in shapes.items():
            with torch.no_grad():
                row = measure(named, method, args.ranks, args.steps, args.warmup)
            numel = sum(p.numel() for _, p in named)
            row["fewer"] = all_reduce_wire_bytes(4 * numel, args.ranks) / row["wire_bytes"]
            row["ns_per_parameter"] = 1e6 * (row["encode_ms"] + row["decode_ms"]) / numel
            result[model][method] = row
            print(
                f"{method:<14}{model:<18}{row['payload_bytes']:14,.0f}{row['wire_bytes']:14,.0f}{row['fewer']:8.1f}"
                f"{row['encode_ms']:9.1f}{row['decode_ms']:9.1f}{row['ns_per_parameter']:7.2f}",
                flush=True,
            )
    print_json({"benchmark": "large_models", "ranks": args.ranks, "models": result})


if __name__ == "__main__":
    main()
