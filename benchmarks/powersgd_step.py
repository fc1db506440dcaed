"""Time of a PowerSGD step without communication: gradient in, averaged gradient and error out.

    python -m benchmarks.powersgd_step [--model resnet18|lstm] --ranks 1 2 4 --threads 1

ours       mode="paper": error feedback, P = M Q, orthonormalize, Q = M^T P, result P Q^T; and "residual" with two
           half steps, which sends the same number of bytes
torch      powerSGD_hook of torch.distributed, tensor by tensor, and with batch_tensors_with_same_shape; the same
           algorithm, which also orthonormalizes Q
fp16       gradients cast to fp16 and back, ours and torch's fp16_compress_hook, for comparison

The gradients are those of ResNet-18 for CIFAR or of the LSTM of `benchmarks.compressors`: all tensors, in flat
fp32 buckets of 25 MB, equal for all methods. There is one process: a stand-in returns the input of every
all-reduce at once, also for torch's hooks. State that methods keep between steps is warm after --warmup steps.
Methods alternate within each round. A ratio is the median over rounds of the ratio within a round. The output is a
table and a last line of JSON.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from benchmarks.compressors import MODELS, parameters_of
from benchmarks.gpu_steps import alone
from benchmarks.harness import Table, in_turns, middle, options, print_json, ratio
from dgc.bucket import Bucket
from dgc.compression import Compressor
from dgc.engine.buckets import plan_buckets
from dgc.engine.state import BucketStates
from scripts.methods import build

TAKES = "1 min, or 3 min with --model lstm"
OURS, RESIDUAL, DEFAULT, BATCHED = "ours, paper", "ours, residual", "torch", "torch, batched"
OURS_FP16, TORCH_FP16 = "ours, fp16", "torch, fp16"


class Ours:
    def __init__(self, buckets: Sequence[Bucket], compressor: Compressor):
        self.states = BucketStates(compressor)
        self.buckets = [Bucket(b.name, b.segments, b.dtype, b.device) for b in buckets]
        for bucket in self.buckets:
            self.states.add(bucket, 1, 0)

    def step(self, gradients: Sequence[Tensor]) -> float:
        for bucket, gradient in zip(self.buckets, gradients, strict=True):
            bucket.flat.copy_(gradient)
        start = time.perf_counter()
        for bucket in self.buckets:
            assert alone(self.states.reduce(bucket)).nonfinite is None
        return time.perf_counter() - start


def answered(tensor: Tensor, **options: Any) -> Any:
    """In place of an all-reduce: the handle of one of a single process, which completes at once."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result([tensor])
    return SimpleNamespace(get_future=lambda: future)


class GradBucket:
    """The parts of torch.distributed.GradBucket that the hook uses."""

    def __init__(self, bucket: Bucket, index: int, last: bool):
        self.flat = torch.zeros(bucket.numel)
        views = [segment.of(self.flat) for segment in bucket.segments]
        self.buffer, self.gradients = lambda: self.flat, lambda: views
        self.index, self.is_last = lambda: index, lambda: last


def power_sgd_hook(rank: int, batched: bool) -> Callable[[Any], Any]:
    state = hooks.PowerSGDState(
        dist.group.WORLD, rank, start_powerSGD_iter=2, batch_tensors_with_same_shape=batched
    )
    state.iter = 2
    return partial(hooks.powerSGD_hook, state)


class Hook:
    def __init__(self, buckets: Sequence[Bucket], hook: Callable[[Any], Any]):
        self.hook = hook
        self.buckets: list[Any] = [GradBucket(b, i, i == len(buckets) - 1) for i, b in enumerate(buckets)]

    def step(self, gradients: Sequence[Tensor]) -> float:
        for bucket, gradient in zip(self.buckets, gradients, strict=True):
            bucket.flat.copy_(gradient)
        with patch.object(dist, "all_reduce", answered):
            start = time.perf_counter()
            for bucket in self.buckets:
                self.hook(bucket).wait()
            return time.perf_counter() - start


def methods(buckets: Sequence[Bucket], rank: int) -> dict[str, "Ours | Hook"]:
    world = dist.group.WORLD
    assert world is not None, "torch's hooks need the process group that main() makes"
    return {
        OURS: Ours(buckets, build(f"powersgd-{rank}-paper")),
        RESIDUAL: Ours(buckets, build(f"powersgd-{rank}")),
        DEFAULT: Hook(buckets, power_sgd_hook(rank, False)),
        BATCHED: Hook(buckets, power_sgd_hook(rank, True)),
        OURS_FP16: Ours(buckets, build("fp16")),
        TORCH_FP16: Hook(buckets, partial(fp16_compress_hook, world)),
    }


def measure(buckets: Sequence[Bucket], rank: int, rounds: int, warmup: int) -> dict[str, dict[int, float]]:
    """Return milliseconds per step, by method and round."""
    generator = torch.Generator().manual_seed(rank)
    pool = [[torch.randn(b.numel, generator=generator) for b in buckets] for _ in range(3)]

    def once(method: Ours | Hook, number: int) -> float:
        return 1e3 * method.step(pool[number % len(pool)])

    works = {name: partial(once, method) for name, method in methods(buckets, rank).items()}
    return in_turns(works, rounds, warmup)


def main() -> None:
    parser = options("benchmarks.powersgd_step", __doc__)
    parser.add_argument("--model", choices=MODELS, default="resnet18")
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2, 4), default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    named = [(name, torch.zeros(tensor.shape)) for name, tensor in parameters_of(args.model)]
    dense = build("dense")
    buckets = [plan.bucket for plan in plan_buckets(named, lambda segment: dense, 25.0, "bucket")]
    numel = sum(bucket.numel for bucket in buckets)
    sizes = f"{numel} parameters in {len(buckets)} buckets"
    print(f"{args.model}: {sizes}, {args.threads} threads, {args.rounds} rounds")
    columns = [("rank", "rank", "5d"), ("ms", "median ms", "11.2f"), ("least", "least", "9.2f")]
    table = Table("", 16, [*columns, ("ratio", "/ ours", "8.2f")])
    result: dict[str, Any] = {"benchmark": "powersgd_step", "model": args.model, "ranks": {}}
    with torch.no_grad():
        for rank in args.ranks:
            times = measure(buckets, rank, args.rounds, args.warmup)
            for name, row in times.items():
                ms, least, against = middle(row), min(row.values()), ratio(row, times[OURS])
                table.add(name, {"rank": rank, "ms": ms, "least": least, "ratio": against})
            result["ranks"][str(rank)] = {
                "ms": {name: round(middle(row), 3) for name, row in times.items()},
                "torch_to_ours": round(ratio(times[DEFAULT], times[OURS]), 3),
                "batched_to_ours": round(ratio(times[BATCHED], times[OURS]), 3),
            }
    dist.destroy_process_group()
    print_json(result)


if __name__ == "__main__":
    main()
