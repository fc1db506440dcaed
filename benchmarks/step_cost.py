"""Time of a training step of small networks, which is the time of Python and of messages: ours, DDP and Horovod.

    python -m benchmarks.step_cost [--ranks 1 2] [--rounds 100]

mlp      two layers, 9,610 parameters in one bucket of each method
tensors  80, 160 and 320 parameters of 64 x 16, each in a bucket of its own. Backward does little else

plain    SGD without other ranks: the floor
DDP      torch's DistributedDataParallel over Gloo, one all-reduce of fp32 per bucket
Horovod  Horovod's DistributedOptimizer, fp32, with Horovod's settings that a user has (fusion of 128 MB)
dense, DGC, PowerSGD    DistributedOptimizer of this library, over the same Gloo or Horovod. DGC sends 10 %
hook ...                dgc.ddp.compress with the same methods

The ranks are started by torchrun (Gloo) and by mpirun (Horovod, over MPI). The time of a step is the largest over
the ranks, from a barrier to the end of optimizer.step(). `overhead` is the median over rounds of the time minus
the time of the plain step in the same round, and `/ DDP` the ratio of overheads. Horovod's optimizer does nothing
on one rank, so there is no ratio to it there.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._harness import Table, in_turns, options, print_json
from benchmarks._launches import begin, run_ranks
from dgc.comm import Transport, all_reduce
from dgc.comm.connect import default_transport
from dgc.ddp import compress
from dgc.optim import DistributedOptimizer
from scripts.methods import build

TAKES = "4 min"
# by name in the output; all for plain SGD
METHODS = {"dense": "dense", "DGC": "dgc-residual", "PowerSGD": "powersgd-1-half"}
DENSITY = 0.1
SIZES = {"mlp": 0, "80 tensors": 80, "160 tensors": 160, "320 tensors": 320}
BUCKET_MB = 25.0
ONE_TENSOR_MB = 4 * 64 * 16 / 2**20
Step = Callable[[], None]


class Tensors(nn.Module):
    """Many small matrices, each of which gets a gradient of its own."""

    def __init__(self, number: int):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(64, 16) for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(weight * x).sum() for weight in self.weights]).sum()


def step_of(model: nn.Module, x: Tensor, optimizer: Any) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


def steps(size: str, transport: Transport, over: str) -> Iterator[tuple[str, Step]]:
    bucket_mb = BUCKET_MB if size == "mlp" else ONE_TENSOR_MB

    def built() -> tuple[nn.Module, Tensor, torch.optim.Optimizer]:
        torch.manual_seed(0)
        mlp = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        model, x = (mlp, torch.randn(16, 64)) if size == "mlp" else (Tensors(SIZES[size]), torch.randn(64, 16))
        return model, x, torch.optim.SGD(model.parameters(), lr=1e-6)

    yield "plain", step_of(*built())
    if over == "gloo":
        model, x, sgd = built()
        yield "DDP", step_of(DistributedDataParallel(model, bucket_cap_mb=bucket_mb), x, sgd)
        for name, method in METHODS.items():
            model, x, sgd = built()
            ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
            compress(ddp, build(method, DENSITY), transport=transport, bucket_mb=bucket_mb)
            yield f"hook {name}", step_of(ddp, x, sgd)
    else:
        import horovod.torch as hvd

        model, x, sgd = built()
        yield "Horovod", step_of(model, x, hvd.DistributedOptimizer(sgd, model.named_parameters()))
    for name, method in METHODS.items():
        model, x, sgd = built()
        named = model.named_parameters()
        ours = DistributedOptimizer(sgd, named, build(method, DENSITY), transport=transport, bucket_mb=bucket_mb)
        yield name, step_of(model, x, ours)


def measure(size: str, transport: Transport, over: str, rounds: int, warmup: int) -> dict[str, list[float]]:
    """Seconds of each method's steps, the largest over the ranks."""

    def once(step: Step, number: int) -> float:
        all_reduce(transport, torch.zeros(1), "sum", "ready")
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    gc.disable()
    works = {name: partial(once, step) for name, step in steps(size, transport, over)}
    own = [list(of.values()) for of in in_turns(works, rounds, warmup).values()]
    gc.enable()
    slowest = all_reduce(transport, torch.tensor(own, dtype=torch.float64), "max", "seconds").tolist()
    return dict(zip(works, slowest, strict=True))


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """What each rank does."""
    torch.set_num_threads(1)
    over = settings["over"]
    if over == "horovod":
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(128 * 2**20))  # the user's, for Horovod's optimizer
    transport = default_transport(transport="torch" if over == "gloo" else "horovod")
    measured = settings["rounds"], settings["warmup"]
    return {size: measure(size, transport, over, *measured) for size in settings["sizes"]}


def report(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for size, rows in found.items():
        plain = rows["plain"]
        overheads = {name: median(t - p for t, p in zip(row, plain, strict=True)) for name, row in rows.items()}
        opponent = next(name for name in ("DDP", "Horovod") if name in rows)
        columns = [("step_us", "step us", "10.0f"), ("overhead_us", "overhead us", "13.0f")]
        table = Table(size, 14, [*columns, ("relative", f"/ {opponent}", "11.2f")])
        for name, row in rows.items():
            # an overhead of less than a tenth of the step is noise
            has_ratio = name != "plain" and overheads[opponent] > 0.1 * median(plain)
            times = {"step_us": 1e6 * median(row), "overhead_us": 1e6 * overheads[name]}
            table.add(name, {**times, "relative": overheads[name] / overheads[opponent] if has_ratio else None})
        result[size] = table.rows
    return result


def main() -> None:
    parser = options("benchmarks.step_cost", __doc__, rounds=100, warmup=10)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--over", nargs="+", choices=("gloo", "horovod"), default=["gloo", "horovod"])
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    args = parser.parse_args()
    if min(args.rounds, *args.ranks) < 1 or args.warmup < 2:
        raise SystemExit("--rounds and --ranks must be at least 1, --warmup at least 2")
    result: dict[str, Any] = {"benchmark": "step_cost", "torch": torch.__version__}
    for over in args.over:
        for ranks in args.ranks:
            launcher = "torchrun" if over == "gloo" else "mpirun"
            found = run_ranks("benchmarks.step_cost", {**vars(args), "over": over}, ranks, launcher=launcher)
            print(f"\n{ranks} rank(s), {over}, 1 thread each, {args.rounds} rounds")
            result[f"{over} {ranks}"] = report(found)
    print_json(result)


if __name__ == "__main__":
    begin(work, main)
