"""Time of backward and exchange through DDP, and the residual on unlike data: this library's hook and torch's.

    python -m benchmarks.ddp_step [--ranks 2] [--factors 1 2 4] [--rounds 30]

The model has the parameters of ResNet-18 with 1000 classes (11.7 million). Its backward pass does no arithmetic.
It returns gradients that were drawn before, in reverse order of registration, so nearly all of the time is that of
DDP and its hook. The benchmark starts its ranks by torchrun on this machine, over Gloo.

no hook          DDP's all-reduce of fp32
torch, fp16      fp16_compress_hook
torch            powerSGD_hook of rank r, with error feedback and warm start
ours, paper      PowerSGDCompressor(r, mode="paper"), which sends as much as torch's
ours, residual   PowerSGDCompressor(r, num_iters_per_step=2), which sends as much
ours, half       PowerSGDCompressor(r): one half step, which sends half as much
ours, ...        DGC at 0.1 %, 2 bits, signs, fp16, and dense

Methods alternate within each round. The time of a step is the largest over the ranks, from a barrier to the end of
backward. A ratio is the median over rounds of the ratio within a round. State that methods keep is warm after
--warmup steps.

The second table has the L2 norm of rank 0's residual while a small network is trained and each rank has data of
other classes. torch's hook keeps M - P Q^T with the mean Q. Only the mean of these errors over the ranks is
bounded. The output is two tables and a last line of JSON.
"""

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.powersgd_step import ratio
from benchmarks.results import print_json
from dgc.comm import Transport, all_reduce
from dgc.comm.torch_distributed import connect
from dgc.compression import (
    Compressor,
    DenseCompressor,
    DGCCompressor,
    FP16Compressor,
    PowerSGDCompressor,
    ThresholdCompressor,
)
from dgc.ddp import DDPExchange, compress
from dgc.memory import ResidualMemory
from dgc_models import resnet18

Hook = Callable[[DistributedDataParallel], Any]
CHECKPOINTS = (50, 100, 200, 400)


class GivenGradient(torch.autograd.Function):
    """Passes a scalar on. In backward, the parameter gets the gradient that was given."""

    @staticmethod
    def forward(ctx: Any, scalar: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return scalar.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, Tensor, None]:
        return incoming[0], ctx.gradient, None


class Given(nn.Module):
    """The parameters of ResNet-18, without its arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            shapes = [p.shape for p in resnet18(num_classes=1000).parameters()]
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        scalar = torch.zeros((), requires_grad=True)
        for parameter, gradient in zip(self.weights, gradients, strict=True):
            scalar = GivenGradient.apply(scalar, parameter, gradient)
        return scalar


def ours(make: Callable[[], Compressor], transport: Transport, model: DistributedDataParallel) -> DDPExchange:
    return compress(model, make(), transport=transport)


class TorchPowerSGD:
    """torch's hook, with a state and a process group for each bucket.

    The hook launches its second and third all-reduce when the one before is complete. With several buckets in one
    process group their order depends on timing, and Gloo fails if it differs between ranks.
    """

    def __init__(self, rank: int, model: DistributedDataParallel):
        self.rank = rank
        self.groups = [dist.new_group(backend="gloo") for _ in range(8)]
        self.states: dict[int, hooks.PowerSGDState] = {}
        self.steps = 0
        model.register_comm_hook(self, torch_power_sgd_hook)

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        i = bucket.index()
        if i not in self.states:
            self.states[i] = hooks.PowerSGDState(self.groups[i], self.rank, start_powerSGD_iter=2)
        self.states[i].iter = self.steps
        self.steps += bucket.is_last()
        return hooks.powerSGD_hook(self.states[i], bucket)

    def error_norm(self) -> float:
        errors = [error for state in self.states.values() for error in state.error_dict.values()]
        return torch.cat(errors).norm().item()


def torch_power_sgd_hook(state: TorchPowerSGD, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.hook(bucket)


def torch_fp16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, fp16_compress_hook)


def groups(factors: Sequence[int], transport: Transport) -> dict[str, dict[str, Hook]]:
    """The methods that are compared. Times are divided by those of the first of a group."""

    def own(make: Callable[[], Compressor]) -> Hook:
        return partial(ours, make, transport)

    found: dict[str, dict[str, Hook]] = {
        "all": {
            "no hook": lambda model: None,
            "torch, fp16": torch_fp16,
            "ours, dense": own(DenseCompressor),
            "ours, fp16": own(FP16Compressor),
            "ours, DGC 0.1 %": own(lambda: DGCCompressor(0.001, ResidualMemory())),
            "ours, 2 bits": own(lambda: ThresholdCompressor(2, 0.5)),
            "ours, signs": own(lambda: ThresholdCompressor(1, 0.0)),
        }
    }
    for r in factors:
        found[f"rank {r}"] = {
            "torch": partial(TorchPowerSGD, r),
            "ours, paper": own(partial(PowerSGDCompressor, r, mode="paper")),
            "ours, residual": own(partial(PowerSGDCompressor, r, num_iters_per_step=2)),
            "ours, half": own(partial(PowerSGDCompressor, r)),
            "no hook": lambda model: None,
        }
    return found


def times(methods: dict[str, Hook], rounds: int, warmup: int, transport: Transport) -> dict[str, list[float]]:
    """Seconds of each step, by method and round. Each round begins with another method."""
    generator = torch.Generator().manual_seed(transport.rank)
    models: dict[str, DistributedDataParallel] = {}
    for name, register in methods.items():
        models[name] = DistributedDataParallel(Given())
        register(models[name])
    shapes = [p.shape for p in models[name].parameters()]
    pool = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2)]
    found: dict[str, list[float]] = {name: [] for name in methods}
    names = list(methods)
    for number in range(warmup + rounds):
        names = names[1:] + names[:1]
        for name in names:
            loss = models[name](pool[number % len(pool)])
            dist.barrier()
            start = time.perf_counter()
            loss.backward()
            seconds = time.perf_counter() - start
            models[name].zero_grad()
            if number >= warmup:
                found[name].append(seconds)
    slowest = all_reduce(transport, torch.tensor(list(found.values()), dtype=torch.float64), "max")
    del models, loss
    gc.collect()
    return dict(zip(list(found), slowest.tolist(), strict=True))


def error_norms(register: Hook, transport: Transport) -> list[float]:
    """The norm of rank 0's residual after each number of steps in CHECKPOINTS."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
    state = register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    classes = 64 // transport.size  # of each rank
    generator = torch.Generator().manual_seed(transport.rank)
    found = []
    for step in range(1, CHECKPOINTS[-1] + 1):
        labels = torch.randint(classes, (32,), generator=generator) + transport.rank * classes
        inputs = nn.functional.one_hot(labels, 64) + torch.randn(32, 64, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if step in CHECKPOINTS:
            found.append(state.error_norm())
    return found


def work(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    transport = connect()
    told = print if transport.rank == 0 else lambda *_: None
    told(f"{transport.size} ranks, 1 thread each, {args.rounds} rounds; torch {torch.__version__}")
    result: dict[str, Any] = {"benchmark": "ddp_step", "ranks": transport.size, "step": {}, "error": {}}
    for group, methods in groups(args.factors, transport).items():
        found = times(methods, args.rounds, args.warmup, transport)
        first = next(iter(methods))
        told(f"\n{group:<16} {'median ms':>10} {'least':>8}   / {first}")
        result["step"][group] = {}
        for name, row in found.items():
            relative = ratio(row, found[first])
            told(f"{name:<16} {1e3 * median(row):10.1f} {1e3 * min(row):8.1f} {relative:6.2f}")
            result["step"][group][name] = {"ms": round(1e3 * median(row), 2), "ratio": round(relative, 3)}
    told(f"\n{'error norm after':<18}" + "".join(f"{steps:>8}" for steps in CHECKPOINTS))
    for group, methods in groups(args.factors, transport).items():
        for name, register in methods.items():
            if group != "all" and name != "no hook":
                norms = error_norms(register, transport)
                told(f"{name:<11}{group:>7}" + "".join(f"{norm:8.2f}" for norm in norms))
                result["error"][f"{name}, {group}"] = [round(norm, 3) for norm in norms]
    if transport.rank == 0:
        print_json(result)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 2, 4], help="ranks r of PowerSGD's factors")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=4)
    args = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        work(args)
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    command = [*launcher, "-m", "benchmarks.ddp_step", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode)


if __name__ == "__main__":
    main()
