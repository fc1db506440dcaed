"""Time of backward and exchange through DDP, and the residual on unlike data: this library's hook and torch's.

    python -m benchmarks.ddp_step [--ranks 2] [--factors 1 2 4] [--rounds 30]

The model has the parameters of ResNet-18 with 1000 classes (11.7 million). Its backward pass does no arithmetic.
It returns gradients that were drawn before, so DDP and its hook take nearly all of the time. The benchmark
starts its ranks by torchrun on this machine, over Gloo.

no hook          DDP's all-reduce of fp32
torch, fp16      fp16_compress_hook, and bf16_compress_hook
torch            powerSGD_hook of rank r, with error feedback and warm start
ours, paper      PowerSGDCompressor(r, mode="paper"), which sends as much as torch's
ours, residual   PowerSGDCompressor(r, num_iters_per_step=2), which sends as much
ours, half       PowerSGDCompressor(r): one half step, which sends half as much
ours, ...        other methods of scripts.methods

The time of a step is the largest over the ranks, from a barrier to the end of backward. The second table has the
L2 norm of rank 0's residual while a small network is trained and each rank has data of other classes. torch's hook
keeps M - P Q^T with the mean Q. Only the mean of these errors over the ranks is bounded.
"""

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks._harness import Table, in_turns, middle, options, print_json, ratio
from benchmarks._launches import begin, connected, run_ranks
from dgc.comm import Transport, all_reduce
from dgc.compression import DGCCompressor, FP16Compressor, PowerSGDCompressor
from dgc.ddp import compress
from dgc_models import resnet18

TAKES = "3 min"
Hook = Callable[[DistributedDataParallel], Any]
CHECKPOINTS = (50, 100, 200, 400)
DENSITY = 0.001
OURS = {"dense": "dense", "fp16": "fp16", "8 bits": "int8", "4 bits": "int4", "DGC 0.1 %": "dgc-residual"}
OURS |= {"2 bits": "2bit", "signs": "1bit", "QSGD": "qsgd"}


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


class TorchPowerSGD:
    """torch's hook, with a state and a process group for each bucket.

    The hook launches its second and third all-reduce when the one before is complete. With several buckets in one
    process group their order depends on timing, and Gloo fails if it differs between ranks.
    """

    def __init__(self, rank: int, model: DistributedDataParallel):
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # it needs NumPy

        self.rank, self.hooks = rank, powerSGD_hook
        self.groups = [dist.new_group() for _ in range(8)]
        self.states: dict[int, Any] = {}
        self.steps = 0
        model.register_comm_hook(self, TorchPowerSGD.hook)

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        i = bucket.index()
        if i not in self.states:
            self.states[i] = self.hooks.PowerSGDState(self.groups[i], self.rank, start_powerSGD_iter=2)
        self.states[i].iter = self.steps
        self.steps += bucket.is_last()
        return self.hooks.powerSGD_hook(self.states[i], bucket)

    def error_norm(self) -> float:
        errors = [error for state in self.states.values() for error in state.error_dict.values()]
        return torch.cat(errors).norm().item()


def torch_fp16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, fp16_compress_hook)


def torch_bf16(model: DistributedDataParallel) -> None:
    """Register torch's hook under another name. DDP refuses its own name without NCCL."""

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return bf16_compress_hook(state, bucket)

    model.register_comm_hook(None, hook)


def groups(factors: Sequence[int], transport: Transport) -> dict[str, dict[str, Hook]]:
    """The methods that are compared. Times are divided by the times of the first of a group."""
    from scripts.methods import build  # it needs OmegaConf, and `whole_steps` does not

    def own(name: str) -> Hook:
        return lambda model: compress(model, build(name, DENSITY), transport=transport)

    found: dict[str, dict[str, Hook]] = {
        "all": {
            "no hook": lambda model: None,
            "torch, fp16": torch_fp16,
            "torch, bf16": torch_bf16,
            "torch, rank 4": partial(TorchPowerSGD, 4),
            **{f"ours, {title}": own(name) for title, name in OURS.items()},
        }
    }
    for r in factors:
        found[f"rank {r}"] = {
            "torch": partial(TorchPowerSGD, r),
            "ours, paper": own(f"powersgd-{r}-paper"),
            "ours, residual": own(f"powersgd-{r}"),
            "ours, half": own(f"powersgd-{r}-half"),
            "no hook": lambda model: None,
        }
    return found


def whole_steps(
    device: torch.device, width: int, transport: Transport
) -> dict[str, Callable[[], Callable[[], None]]]:
    """Constructors of training steps of four layers through DDP, with torch's hooks and ours. Collective."""

    def make(register: Hook) -> Callable[[], None]:
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device)
        model, x = DistributedDataParallel(net), torch.randn(64, width, device=device)
        register(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return step

    ours = {"fp16": FP16Compressor(), "PowerSGD, rank 4": PowerSGDCompressor(4)}
    ours["DGC"] = DGCCompressor(0.001, "residual")
    hooks: dict[str, Hook] = {
        "DDP, no hook": lambda model: None,
        "DDP, torch's fp16": torch_fp16,
        "DDP, torch's PowerSGD, rank 4": partial(TorchPowerSGD, 4),
    }
    for name, own in ours.items():
        hooks[f"DDP, our {name}"] = partial(compress, compression=own, transport=transport)
    return {name: partial(make, register) for name, register in hooks.items()}


def times(methods: dict[str, Hook], rounds: int, warmup: int, transport: Transport) -> dict[str, dict[int, float]]:
    """Milliseconds of each step, by method and round: the largest over the ranks."""
    generator = torch.Generator().manual_seed(transport.rank)
    models: dict[str, DistributedDataParallel] = {}
    for name, register in methods.items():
        models[name] = DistributedDataParallel(Given())
        register(models[name])
    shapes = [p.shape for p in models[name].parameters()]
    pool = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2)]

    def once(model: DistributedDataParallel, number: int) -> float:
        loss = model(pool[number % len(pool)])
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        seconds = time.perf_counter() - start
        model.zero_grad()
        return 1e3 * seconds

    found = in_turns({name: partial(once, model) for name, model in models.items()}, rounds, warmup)
    own = torch.tensor([list(of.values()) for of in found.values()], dtype=torch.float64)
    slowest = all_reduce(transport, own, "max").tolist()
    del models
    gc.collect()
    return {name: dict(enumerate(of)) for name, of in zip(found, slowest, strict=True)}


def error_norms(register: Hook, transport: Transport) -> dict[str, float]:
    """The norm of rank 0's residual after each number of steps in CHECKPOINTS."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
    state = register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    classes = 64 // transport.size  # of each rank
    generator = torch.Generator().manual_seed(transport.rank)
    found = {}
    for step in range(1, CHECKPOINTS[-1] + 1):
        labels = torch.randint(classes, (32,), generator=generator) + transport.rank * classes
        inputs = nn.functional.one_hot(labels, 64) + torch.randn(32, 64, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if step in CHECKPOINTS:
            found[str(step)] = state.error_norm()
    return found


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """What each rank does."""
    torch.set_num_threads(1)
    transport = connected("torchrun")
    compared, rounds = groups(settings["factors"], transport).items(), (settings["rounds"], settings["warmup"])
    steps = {group: times(methods, *rounds, transport) for group, methods in compared}
    norms = {
        f"{name:<11}{group:>7}": error_norms(register, transport)
        for group, methods in compared
        for name, register in methods.items()
        if group != "all" and name != "no hook"
    }
    dist.destroy_process_group()
    return {"step": steps, "error": norms}


def main() -> None:
    parser = options("benchmarks.ddp_step", __doc__, ranks=2, rounds=30, warmup=4)
    parser.add_argument("--factors", type=int, nargs="+", choices=(1, 2, 4), default=[1, 2, 4], help="of PowerSGD")
    args = parser.parse_args()
    found = run_ranks("benchmarks.ddp_step", vars(args), args.ranks, launcher="torchrun")
    print(f"{args.ranks} ranks, 1 thread each, {args.rounds} rounds; torch {torch.__version__}")
    result: dict[str, Any] = {"benchmark": "ddp_step", "ranks": args.ranks, "step": {}}
    for group, of in found["step"].items():
        rows = {name: {int(number): ms for number, ms in row.items()} for name, row in of.items()}
        first = next(iter(rows))
        columns = [("ms", "median ms", "11.1f"), ("least", "least", "9.1f"), ("ratio", f"/ {first}", "10.2f")]
        table = Table(group, 16, columns)
        for name, row in rows.items():
            against = {"least": min(row.values()), "ratio": ratio(row, rows[first])}
            table.add(name, {"ms": middle(row), **against})
        result["step"][group] = table.rows
    columns = [(str(steps), str(steps), "8.2f") for steps in CHECKPOINTS]
    print_json({**result, "error": Table("error norm after", 18, columns, found["error"]).rows})


if __name__ == "__main__":
    begin(work, main)
