"""Bytes and time of one step of each method, on gradients of the shapes of four networks.

    python -m benchmarks.compressors --models resnet50 transformer-big --methods dense fp16 dgc powersgd-2

resnet18           for CIFAR (He et al. 2016), 24 steps per epoch: the first experiment of the PowerSGD paper
lstm               three layers of 650, a vocabulary of 28,869 in one shared embedding, 70 steps per epoch: the
                   second one
resnet50           torchvision's (He et al. 2016): 25,557,032 parameters, 102 MB
transformer-big    configs/wmt16/big.py (Vaswani et al. 2017): 209,125,376 parameters, 837 MB

Ranks are simulated in one process. One bucket of 25 MB, or one larger tensor, takes all its steps before the next
one begins, so that the states of two ranks fit into little memory. The gradient of each rank is a direction common
to all ranks plus its own noise, with heavy tails and tensors of different scales.

payload    bytes that one rank contributes per step, by the meter; MiB per epoch
wire       bytes that one rank sends per step; factor below a dense fp32 all-reduce
encode     milliseconds until the first message is ready; decode: the rest, including orthonormalization. Both are
           those of rank 0, as sums over the buckets of the medians over the steps after a warm-up
ns         nanoseconds of both per parameter

For torch's PowerSGD and fp16 hooks on the same shapes see benchmarks.powersgd_step. The last line of the output is
JSON, after a table.
"""

import time
from collections.abc import Generator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.exchange import parameters_of as parameters_of_torchvision
from benchmarks.harness import Table, add_methods, options, print_json
from dgc.bucket import Bucket
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.meter import all_reduce_wire_bytes
from dgc.comm.requests import Conversation, next_requests
from dgc.compression import Result, Route, Rule
from dgc.engine.buckets import keep_states, plan_buckets
from dgc_models import resnet18, transformer_big
from dgc_training.config import load
from scripts.methods import COMPRESSORS, build

TAKES = "20 s, or 4 min with transformer-big"
MODELS = ("resnet18", "lstm", "resnet50", "transformer-big")
STEPS_PER_EPOCH = {"resnet18": 24, "lstm": 70}
MIB = 2**20
Named = Sequence[tuple[str, Tensor]]


def parameters_of(model: str) -> Named:
    """The parameters of a model by name. Only their shapes are used."""
    if model == "resnet50":
        return parameters_of_torchvision(model)
    with torch.device("meta"):
        if model == "resnet18":
            return list(resnet18(num_classes=10).named_parameters())
        if model == "lstm":
            lstm = torch.nn.LSTM(650, 650, 3)
            return [("embedding", torch.empty(28869, 650)), *lstm.named_parameters(), ("bias", torch.empty(28869))]
        vocabulary = load(["configs/wmt16/base.py", "configs/wmt16/big.py"]).dataset.vocabulary_size
        return list(transformer_big(vocabulary=vocabulary).named_parameters())


def gradients_of(bucket: Bucket, size: int, step: int) -> list[Tensor]:
    """The gradient of each rank."""
    generator = torch.Generator().manual_seed(1000 * step)
    common = torch.randn(bucket.numel, generator=generator)
    scales = torch.empty(bucket.numel)
    for i, s in enumerate(bucket.segments):
        scales[s.offset : s.offset + s.numel] = 10.0 ** (-2 - i % 3)
    scales *= torch.randn(bucket.numel, generator=generator).mul_(0.7).exp_()
    return [(common + torch.randn(bucket.numel, generator=generator)) * scales for _ in range(size)]


def timed(conversation: Conversation[Result], seconds: dict[str, float]) -> Conversation[Result]:
    """Run the conversation, and note the seconds of encoding and of decoding."""

    def run() -> Generator[Any, Any, Result]:
        seconds["decode"], start = 0.0, time.perf_counter()
        requests = next_requests(conversation)
        seconds["encode"] = time.perf_counter() - start
        while True:
            replies = yield requests
            start = time.perf_counter()
            try:
                requests = next_requests(conversation, replies)
            except StopIteration as stop:
                result: Result = stop.value
                return result
            finally:
                seconds["decode"] += time.perf_counter() - start

    return run()


def buckets_of(named: Named, method: str, ratio: float) -> list[Named]:
    """The parameters of each bucket, in the order of the model."""
    planned = plan_buckets(named, Route([Rule(build(method, ratio))]).compressor_for, 25.0, "bucket")
    return [[pair for pair in named if pair[0] in {s.name for s in plan.bucket.segments}] for plan in planned]


def measure(named: Named, method: str, ratio: float, size: int, steps: int, warmup: int) -> dict[str, float]:
    """Bytes of a step, and milliseconds of rank 0."""
    found = dict.fromkeys(("payload_bytes", "wire_bytes", "encode_ms", "decode_ms"), 0.0)
    for group in buckets_of(named, method, ratio):
        real = [(name, torch.zeros(p.shape, device="cpu")) for name, p in group]
        ranks = []
        for rank in range(size):
            (plan,) = plan_buckets(real, Route([Rule(build(method, ratio))]).compressor_for, 1e6, "bucket")
            keep_states([plan], size, rank)
            ranks.append(plan)
        world, taken = LockstepWorld(size), []
        for step in range(warmup + steps):
            for plan, gradient in zip(ranks, gradients_of(ranks[0].bucket, size, step), strict=True):
                plan.bucket.flat.copy_(gradient)
            own: list[dict[str, float]] = [{} for _ in ranks]
            conversations = [
                timed(plan.states.reduce(plan.bucket), of) for plan, of in zip(ranks, own, strict=True)
            ]
            world.converse("bucket", conversations)
            taken.append(own[0])
        found["payload_bytes"] += world.meters[0].payload_bytes / (warmup + steps)
        found["wire_bytes"] += world.meters[0].wire_bytes / (warmup + steps)
        for what in ("encode", "decode"):
            found[f"{what}_ms"] += 1e3 * median(of[what] for of in taken[warmup:])
    return found


def main() -> None:
    parser = options("benchmarks.compressors", __doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["resnet18"])
    parser.add_argument("--ratio", type=float, default=0.001)
    add_methods(parser, COMPRESSORS, ["dense", "fp16", "dgc", "dgc-sign-rice", "powersgd-2", "powersgd-4", "qsgd"])
    parser.add_argument("--ranks", type=int, default=2, help="2 or more")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after --warmup")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks: one rank sends nothing")
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {}
    for model in args.models:
        named, epoch = parameters_of(model), STEPS_PER_EPOCH.get(model)
        numel = sum(p.numel() for _, p in named)
        print(f"\n{model}: {numel:,} parameters, {args.ranks} ranks, {args.threads} threads", end="")
        columns = [("payload_bytes", "payload", "14,.0f"), ("mib_per_epoch", "MiB/epoch", "11.1f")]
        columns += [("wire_bytes", "wire", "14,.0f"), ("fewer", "fewer", "8.1f"), ("encode_ms", "encode", "9.1f")]
        table = Table("", 26, [*columns, ("decode_ms", "decode", "9.1f"), ("ns_per_parameter", "ns", "7.2f")])
        for method in args.methods:
            with torch.no_grad():
                row = measure(named, method, args.ratio, args.ranks, args.steps, args.warmup)
            row["fewer"] = all_reduce_wire_bytes(4 * numel, args.ranks) / row["wire_bytes"]
            row["ns_per_parameter"] = 1e6 * (row["encode_ms"] + row["decode_ms"]) / numel
            per_epoch = {} if epoch is None else {"mib_per_epoch": row["payload_bytes"] * epoch / MIB}
            table.add(method, row | per_epoch)
        result[model] = table.rows
    print_json({"benchmark": "compressors", "ranks": args.ranks, "models": result})


if __name__ == "__main__":
    main()
