"""Time of one exchange of a model's gradients between ranks on this machine, for all methods in one run.

    python -m benchmarks.exchange --ranks 4 --model resnet50 --methods noop dense fp16 dgc dgc-sign-rice

Gradients are ready at the start and applied at the end, without forward and backward. `exchange` is the time from
the start of the first bucket until the last reply is decoded. `step` adds the update of the parameters. `noop`
exchanges nothing and is a lower bound for all methods. Each time is that of the slowest rank, as the median over
repeats, which are interleaved over the methods. Bytes are those that one rank contributes (payload) and sends
(wire) in a step.

All ranks share this machine: they compete for its cores, and the "network" is memory. The benchmark therefore
shows the cost of compression, not its gain on a slow network. The output is a table and a last line of JSON.
"""

import argparse
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

import dgc.kernels as kernels
import dgc_datasets.torchvision_compat  # noqa: F401  (before torchvision)
from benchmarks.results import print_json
from dgc.bucket import Bucket
from dgc.comm import Transport, all_gather_object, barrier
from dgc.comm.requests import Conversation
from dgc.compression import (
    BF16Compressor,
    DenseCompressor,
    DGCCompressor,
    FP16Compressor,
    PowerSGDCompressor,
    ScaledSignCompressor,
    ThresholdCompressor,
)
from dgc.compression.protocol import Compressor, DenseResult, Result, StatelessCompressor
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from dgc.wire import CastValues, PackedIndices, PlainIndices, RiceIndices, SignValues
from scripts.launch import replace_process

GRADIENT_SETS = 3


class Noop(StatelessCompressor):
    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        yield from ()
        return DenseResult()


def dgc(ratio: float, **settings: Any) -> Compressor:
    return DGCCompressor(ratio, DGCSGDMemory(0.9), **settings)


METHODS: dict[str, Callable[[float], Compressor]] = {
    "noop": lambda ratio: Noop(),
    "dense": lambda ratio: DenseCompressor(),
    "fp16": lambda ratio: FP16Compressor(),
    "bf16": lambda ratio: BF16Compressor(),
    "dgc": lambda ratio: dgc(ratio),
    "dgc-fp16-int32": lambda ratio: dgc(ratio, fp16_values=True, int32_indices=True),
    "dgc-fp16-packed": lambda ratio: dgc(ratio, values=CastValues("fp16"), indices=PackedIndices()),
    "dgc-sign-rice": lambda ratio: dgc(ratio, values=SignValues(), indices=RiceIndices()),
    "dgc-sign-rice-dense-fp32": lambda ratio: dgc(
        ratio, values=SignValues(), indices=RiceIndices(), dense_values="fp32"
    ),
    "dgc-reduce-scatter": lambda ratio: dgc(ratio, exchange="reduce_scatter"),
    "powersgd": lambda ratio: PowerSGDCompressor(2),
    "sign": lambda ratio: ScaledSignCompressor(),
    "2bit": lambda ratio: ThresholdCompressor(),
    "dgc-sampled": lambda ratio: dgc(ratio, sample_ratio=0.01, indices=PlainIndices("int32")),
}


def parameters_of(model: str) -> list[tuple[str, torch.nn.Parameter]]:
    from torchvision import models

    with torch.device("meta"):
        shapes = {name: p.shape for name, p in models.get_model(model).named_parameters()}
    return [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]


class Method:
    """One method's parameters, optimizer and times."""

    def __init__(self, name: str, args: argparse.Namespace, transport: Transport):
        named = parameters_of(args.model)
        optimizer = DGCSGD([p for _, p in named], lr=1e-3, momentum=0.9)
        compressor = METHODS[name](args.ratio)
        self.parameters = [p for _, p in named]
        self.optimizer = DistributedOptimizer(optimizer, named, compressor, transport=transport)
        self.times: list[tuple[float, float]] = []

    def step(self, gradients: list[torch.Tensor]) -> None:
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient
        barrier(self.optimizer.transport)
        before = self.optimizer.meter.seconds["step"]
        start = perf_counter()
        self.optimizer.step()
        whole = perf_counter() - start
        self.times.append((whole - (self.optimizer.meter.seconds["step"] - before), whole))


def work(args: argparse.Namespace) -> None:
    from dgc.comm.horovod import HorovodTransport

    transport = HorovodTransport()
    methods = {name: Method(name, args, transport) for name in args.methods}
    generator = torch.Generator().manual_seed(transport.rank)
    shapes = [p.shape for p in next(iter(methods.values())).parameters]
    sets = [[torch.randn(s, generator=generator) * 1e-3 for s in shapes] for _ in range(GRADIENT_SETS)]
    for repeat in range(args.warmup + args.repeats):
        for method in methods.values():
            if repeat == args.warmup:
                method.times.clear()
                meter = method.optimizer.meter
                meter.payload_bytes, meter.wire_bytes, meter.rounds = 0, 0.0, 0
            method.step(sets[repeat % GRADIENT_SETS])
    everyone = all_gather_object(transport, {name: method.times for name, method in methods.items()})
    if transport.rank == 0:
        report(args, methods, everyone)


def report(
    args: argparse.Namespace, methods: dict[str, Method], everyone: list[dict[str, list[tuple[float, float]]]]
) -> None:
    numel = sum(p.numel() for p in next(iter(methods.values())).parameters)
    print(
        f"{args.model}: {numel:,} parameters, {args.ranks} ranks, {torch.get_num_threads()} threads each, ratio "
        f"{args.ratio}, {args.repeats} repeats, kernels {kernels.describe(torch.device('cpu'))}\n"
    )
    print(f"{'method':<16} {'exchange ms':>11} {'step ms':>9} {'payload MB':>11} {'wire MB':>9}")
    result: dict[str, Any] = {}
    for name, method in methods.items():
        slowest = [
            [max(times[name][i][j] for times in everyone) for i in range(args.repeats)] for j in range(2)
        ]
        meter = method.optimizer.meter
        row = {
            "exchange_ms": 1e3 * median(slowest[0]),
            "step_ms": 1e3 * median(slowest[1]),
            "payload_bytes": meter.payload_bytes / args.repeats,
            "wire_bytes": meter.wire_bytes / args.repeats,
        }
        result[name] = row
        print(
            f"{name:<16} {row['exchange_ms']:11.1f} {row['step_ms']:9.1f} {row['payload_bytes'] / 1e6:11.3f} "
            f"{row['wire_bytes'] / 1e6:9.3f}"
        )
    settings = {"model": args.model, "ratio": args.ratio, "ranks": args.ranks}
    print_json({"benchmark": "exchange", **settings, "methods": result})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", choices=("resnet18", "resnet50", "vgg16"), default="resnet50")
    parser.add_argument("--ratio", type=float, default=0.001)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["noop", "dense", "fp16", "dgc"])
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    replace_process(args.ranks, ["-m", "benchmarks.exchange", *sys.argv[1:], "--worker"])


if __name__ == "__main__":
    main()
