"""Time of Muon's step if every rank iterates all matrices, and if each matrix is iterated on one rank, its owner.

    python -m benchmarks.muon_step [--ranks 4] [--layers 2] [--width 512] [--rounds 10] [--precision auto]

The model has the matrices of transformer layers (queries, keys, values, output, and an MLP of 4 times the width),
and a vector per layer. Gradients are given, the same on all ranks, so nothing but the optimizer's step takes time.
Ranks are started by torchrun on this machine, over Gloo, with one thread each.

DDP, torch           torch.optim.Muon, which iterates in bf16, and AdamW
DDP, every rank      MuonWithAdamW(owners="off")
DDP, owners          owners="on"; with update_bits=16 in "16 bits"
FSDP2, every rank    owners="off": each rank gathers and iterates all matrices
FSDP2, owners        owners="auto", the default
HSDP, every rank     owners="off", on a mesh of 2 replicas
HSDP, replica        owners="auto": each replica iterates all matrices once, on its ranks
HSDP, owners         owners="on"

The time of a step is the largest over the ranks, from a barrier to the end of the step. CPU seconds are the sum
over the ranks, which does not depend on how many cores they share. "equal" is 1 if all ranks ended with the same
bits.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks._harness import Table, in_turns, middle, options, print_json, ratio
from benchmarks._launches import begin, connected, run_ranks
from dgc.comm import Transport, all_reduce
from dgc.optim import MuonWithAdamW, muon_groups

TAKES = "2 min"
Step = Callable[[], Any]


class Layer(nn.Module):
    """The parameters of a transformer layer."""

    def __init__(self, width: int):
        super().__init__()
        shapes = {name: (width, width) for name in ("query", "key", "value", "out")}
        shapes |= {"up": (4 * width, width), "down": (width, 4 * width)}
        self.matrices = nn.ParameterDict({name: torch.randn(shape) for name, shape in shapes.items()})
        self.scale = nn.Parameter(torch.ones(width))


def model_of(settings: dict[str, Any]) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Layer(settings["width"]) for _ in range(settings["layers"])])


def sharded(settings: dict[str, Any], mesh: DeviceMesh) -> nn.ModuleList:
    model = model_of(settings)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return model


def give_gradients(model: nn.Module) -> None:
    """Each rank that has a part of a parameter gets the same part of its gradient."""
    for i, p in enumerate(model.parameters()):
        whole = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(whole, p.device_mesh, p.placements)
        else:
            p.grad = whole


def torchs(model: nn.Module) -> Step:
    matrices, vectors = (
        [p for p in model.parameters() if (p.dim() == 2) == is_matrix] for is_matrix in (True, False)
    )
    two = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(vectors)
    return lambda: [optimizer.step() for optimizer in two]


def steps(settings: dict[str, Any], transport: Transport) -> dict[str, tuple[nn.Module, Step]]:
    """The models, and the step of each."""
    flat = init_device_mesh("cpu", (transport.size,))
    replicas = init_device_mesh("cpu", (2, transport.size // 2), mesh_dim_names=("replica", "shard"))

    def ours(model: nn.Module, owners: str, **more: Any) -> tuple[nn.Module, Step]:
        given = {"ns_precision": settings["precision"], "owners": owners, **more}
        return model, MuonWithAdamW(muon_groups(model, show=False), **given).step

    whole = model_of(settings)
    shared = partial(ours, owners="on", transport=transport)
    return {
        "DDP, torch": (whole, torchs(whole)),
        "DDP, every rank": ours(model_of(settings), "off"),
        "DDP, owners": shared(model_of(settings)),
        "DDP, owners, 16 bits": shared(model_of(settings), update_bits=16),
        "FSDP2, every rank": ours(sharded(settings, flat), "off"),
        "FSDP2, owners": ours(sharded(settings, flat), "auto"),
        "HSDP, every rank": ours(sharded(settings, replicas), "off"),
        "HSDP, replica": ours(sharded(settings, replicas), "auto"),
        "HSDP, owners": ours(sharded(settings, replicas), "on"),
    }


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """What each rank does."""
    torch.set_num_threads(1)
    transport = connected("torchrun")
    found = steps(settings, transport)

    def once(step: Step, number: int) -> tuple[float, float]:
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        step()
        return 1e3 * (time.perf_counter() - start), time.process_time() - cpu

    for model, _ in found.values():
        give_gradients(model)
    measured = in_turns({name: partial(once, step) for name, (_, step) in found.items()}, settings["rounds"], 2)
    own = torch.tensor([list(of.values()) for of in measured.values()], dtype=torch.float64)  # [steps, rounds, 2]
    slowest = all_reduce(transport, own[..., 0].contiguous(), "max").tolist()
    seconds = all_reduce(transport, own[..., 1].contiguous(), "sum").tolist()
    equal = {name: is_equal(model, transport) for name, (model, _) in found.items()}
    dist.destroy_process_group()
    rows = zip(found, slowest, seconds, strict=True)
    return {name: {"ms": ms, "cpu": cpu, "equal": equal[name]} for name, ms, cpu in rows}


def is_equal(model: nn.Module, transport: Transport) -> bool:
    """Whether all ranks have the same bits in what they hold in common."""
    values = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    bits = torch.cat([value.flatten() for value in values]).view(torch.int32)
    return torch.equal(all_reduce(transport, bits, "max"), all_reduce(transport, bits, "min"))


def main() -> None:
    parser = options("benchmarks.muon_step", __doc__, ranks=4, layers=2, width=512, rounds=10)
    parser.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto", help="of the iterations")
    args = parser.parse_args()
    found = run_ranks("benchmarks.muon_step", vars(args), args.ranks, launcher="torchrun")
    print(f"{args.ranks} ranks, 1 thread each, {args.rounds} rounds; torch {torch.__version__}")
    columns = [("ms", "median ms", "11.1f"), ("least", "least", "9.1f"), ("ratio", "/ every rank", "14.2f")]
    columns += [("cpu", "CPU s", "8.2f"), ("cpu_ratio", "/ every rank", "14.2f"), ("equal", "equal", "7d")]
    table = Table("step", 22, columns)
    for name, row in found.items():
        first = found[f"{name.split(',')[0]}, every rank"]
        ms, against = ({**dict(enumerate(of["ms"]))} for of in (row, first))
        cpu, cpu_against = (dict(enumerate(of["cpu"])) for of in (row, first))
        times = {"ms": middle(ms), "least": min(ms.values()), "ratio": ratio(ms, against)}
        cpus = {"cpu": middle(cpu), "cpu_ratio": ratio(cpu, cpu_against)}
        table.add(name, {**times, **cpus, "equal": row["equal"]})
    print_json({"benchmark": "muon_step", "ranks": args.ranks, "steps": table.rows})


if __name__ == "__main__":
    begin(work, main)
