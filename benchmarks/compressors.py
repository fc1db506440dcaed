"""Bytes sent, time and error of every compressor, on the gradients of two networks.

    python -m benchmarks.compressors [--model resnet18|lstm] [--ranks 2] [--methods powersgd-2 qsgd ...]

resnet18   for CIFAR (He et al. 2016), 24 steps per epoch: the first experiment of the PowerSGD paper
lstm       three layers of 650, a vocabulary of 28,869 in one shared embedding, 70 steps per epoch: the second one

Ranks are simulated in one process. The gradient of each rank is a direction common to all ranks plus its own
noise, with heavy tails and tensors of different scales, in buckets of 25 MB. Communication takes no time. Times
are those of rank 0 over all buckets, as medians over the steps after a warm-up. Methods with error feedback keep
their residual from step to step.

payload    bytes that one rank contributes per step
wire       bytes that one rank sends per step; MiB per epoch; factor below a dense fp32 all-reduce
encode     milliseconds until the first message is ready; decode: the rest, including orthonormalization
error      |residual| / |gradient + previous residual| after the last step
mean       |mean returned - true mean| / |true mean|, of sums over all steps, so delays lose weight

For torch's PowerSGD and fp16 hooks on the same shapes, interleaved with ours, see benchmarks.powersgd_step. The
last line of the output is JSON, after a table.
"""

import argparse
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import print_json
from dgc.bucket import Bucket
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.meter import all_reduce_wire_bytes
from dgc.comm.requests import Conversation, next_requests
from dgc.compression import (
    AtomoCompressor,
    BF16Compressor,
    BlockwiseCompressor,
    Compressor,
    DenseCompressor,
    DGCCompressor,
    FP16Compressor,
    NaturalCompressor,
    OneBitCompressor,
    PowerSGDCompressor,
    QSGDCompressor,
    RandomBlockCompressor,
    RandomKCompressor,
    Result,
    Route,
    Rule,
    ScaledSignCompressor,
    SignSGDCompressor,
    SparseResult,
    SVDCompressor,
    TernGradCompressor,
    ThresholdCompressor,
)
from dgc.engine.buckets import keep_states, plan_buckets
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.wire import RiceIndices, SignValues
from dgc_models import resnet18

Make = Callable[[], Compressor]
METHODS: dict[str, Make] = {
    "dense": DenseCompressor,
    "fp16": FP16Compressor,
    "bf16": BF16Compressor,
    "dgc 0.1 %": lambda: DGCCompressor(0.001, DGCSGDMemory(0.9), fp16_values=True, int32_indices=True),
    "dgc 0.1 % sign rice": lambda: DGCCompressor(
        0.001, DGCSGDMemory(0.9), values=SignValues(), indices=RiceIndices()
    ),
    "top-k 1 %": lambda: DGCCompressor(0.01, ResidualMemory(), int32_indices=True),
    **{
        f"powersgd-{rank}": partial(PowerSGDCompressor, rank, mode="paper", min_compression_rate=1)
        for rank in (1, 2, 4, 7)
    },
    "powersgd-2 residual": lambda: PowerSGDCompressor(2, min_compression_rate=1),
    "2 bits": ThresholdCompressor,
    "2 bits adaptive": lambda: ThresholdCompressor(threshold=None),
    "1 bit": lambda: ThresholdCompressor(bits=1, threshold=0.0),
    "scaled sign": ScaledSignCompressor,
    "1-bit sgd": OneBitCompressor,
    "signsgd": SignSGDCompressor,
    "qsgd 4 bits": QSGDCompressor,
    "qsgd 8 bits": lambda: QSGDCompressor(bits=8),
    "terngrad": TernGradCompressor,
    "natural": NaturalCompressor,
    "blockwise 8 bits": BlockwiseCompressor,
    "random-k 5 %": lambda: RandomKCompressor(0.05),
    "random block 5 %": lambda: RandomBlockCompressor(0.05),
    "svd-2": lambda: SVDCompressor(2),
    "atomo-2": lambda: AtomoCompressor(2),
}
SLOW = ("svd-2", "atomo-2")
STEPS_PER_EPOCH = {"resnet18": 24, "lstm": 70}
MIB = 2**20


def parameters_of(model: str) -> list[tuple[str, Tensor]]:
    with torch.device("meta"):
        if model == "resnet18":
            return list(resnet18(num_classes=10).named_parameters())
        lstm = torch.nn.LSTM(650, 650, 3)
        return [("embedding", torch.empty(28869, 650)), *lstm.named_parameters(), ("bias", torch.empty(28869))]


class Gradients:
    """Gradients by step, bucket and rank."""

    def __init__(self, buckets: list[Bucket], size: int):
        self.buckets, self.size = buckets, size

    def of(self, step: int, b: int) -> list[Tensor]:
        n = self.buckets[b].numel
        generator = torch.Generator().manual_seed(1000 * step + b)
        common = torch.randn(n, generator=generator)
        scales = torch.empty(n)
        for i, s in enumerate(self.buckets[b].segments):
            scales[s.offset : s.offset + s.numel] = 10.0 ** (-2 - i % 3)
        tails = torch.randn(n, generator=generator).mul_(0.7).exp_()
        own = (torch.randn(n, generator=generator) for _ in range(self.size))
        return [(common + noise) * scales * tails for noise in own]


@dataclass
class Clock:
    encode: float = 0.0
    decode: float = 0.0


def timed(conversation: Conversation[Result], clock: Clock) -> Conversation[Result]:
    """Run the conversation and add its times to the totals."""

    def run() -> Generator[Any, Any, Result]:
        start = time.perf_counter()
        requests = next_requests(conversation)
        clock.encode += time.perf_counter() - start
        while True:
            replies = yield requests
            start = time.perf_counter()
            try:
                requests = next_requests(conversation, replies)
            except StopIteration as stop:
                result: Result = stop.value
                return result
            finally:
                clock.decode += time.perf_counter() - start

    return run()


@dataclass
class Measured:
    payload: float = 0.0
    wire: float = 0.0
    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    error: float = math.nan
    mean: float = math.nan


def measure(name: str, model: str, size: int, steps: int, warmup: int) -> Measured:
    make, named = METHODS[name], [(n, torch.empty_like(p, device="cpu")) for n, p in parameters_of(model)]
    ranks = []
    for rank in range(size):
        compressor = make()
        planned = plan_buckets(named, Route([Rule(compressor)]).compressor_for, 25.0, "bucket")
        ranks.append((keep_states(planned, size, rank, [compressor])[0], planned))
    world = LockstepWorld(size)
    gradients = Gradients([plan.bucket for plan in ranks[0][1]], size)
    found = Measured()
    due, late, true = 0.0, [], []
    for step in range(warmup + steps):
        clock, before = Clock(), [e.clone() for e in ranks[0][0].errors()]
        for b, plan in enumerate(ranks[0][1]):
            own = gradients.of(step, b)
            buckets = [planned[b].bucket for _, planned in ranks]
            for bucket, gradient in zip(buckets, own, strict=True):
                bucket.flat.copy_(gradient)
            clocks = [clock, *(Clock() for _ in range(size - 1))]
            conversations = [
                timed(planned[b].states.reduce(bucket), c)
                for (_, planned), bucket, c in zip(ranks, buckets, clocks, strict=True)
            ]
            result = world.converse(plan.bucket.name, conversations)[0]
            mean = buckets[0].flat
            if isinstance(result, SparseResult):
                mean = torch.zeros(plan.bucket.numel)
                mean[result.indices] = result.values
            if step == 0:
                late.append(torch.zeros_like(mean))
                true.append(torch.zeros_like(mean))
            true[b] += torch.stack(own).mean(0)
            late[b] += mean
            if step == warmup + steps - 1:
                waiting = before[b] if len(before) == len(ranks[0][1]) else torch.zeros(())
                due += float((own[0] + waiting).square().sum())
        if step >= warmup:
            found.encode.append(1e3 * clock.encode)
            found.decode.append(1e3 * clock.decode)
    found.payload = world.meters[0].payload_bytes / (warmup + steps)
    found.wire = world.meters[0].wire_bytes / (warmup + steps)
    found.error = math.sqrt(sum(float(e.square().sum()) for e in ranks[0][0].errors()) / due)
    apart = sum(float((a - b).square().sum()) for a, b in zip(late, true, strict=True))
    found.mean = math.sqrt(apart / sum(float(t.square().sum()) for t in true))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=STEPS_PER_EPOCH, default="resnet18")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7, help="timed steps, after --warmup")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    epoch = STEPS_PER_EPOCH[args.model]
    numel = sum(p.numel() for _, p in parameters_of(args.model))
    dense = all_reduce_wire_bytes(4 * numel, args.ranks)
    where = f"{args.ranks} ranks, {args.threads} threads, {epoch} steps per epoch"
    print(f"{args.model}: {numel:,} parameters, {where}")
    heads = f"{'payload':>12}{'wire':>12}{'MiB/epoch':>11}{'fewer':>8}"
    heads += f"{'encode':>9}{'decode':>9}{'error':>8}{'mean':>8}"
    print(f"\n{'':<22}{heads}")
    rows: dict[str, dict[str, float]] = {}
    for name in args.methods:
        slow = name in SLOW
        with torch.no_grad():
            found = measure(name, args.model, args.ranks, 1 if slow else args.steps, 0 if slow else args.warmup)
        rows[name] = {
            "payload_bytes": found.payload,
            "wire_bytes": found.wire,
            "mib_per_epoch": found.wire * epoch / MIB,
            "fewer": dense / found.wire if found.wire else math.nan,
            "encode_ms": median(found.encode),
            "decode_ms": median(found.decode),
            "error": found.error,
            "mean": found.mean,
        }
        r = rows[name]
        cells = f"{r['payload_bytes']:12,.0f}{r['wire_bytes']:12,.0f}{r['mib_per_epoch']:11.1f}{r['fewer']:8.1f}"
        cells += f"{r['encode_ms']:9.1f}{r['decode_ms']:9.1f}{r['error']:8.3f}{r['mean']:8.3f}"
        print(f"{name:<22}{cells}", flush=True)
    print_json({"benchmark": "compressors", "model": args.model, "ranks": args.ranks, "methods": rows})


if __name__ == "__main__":
    main()
