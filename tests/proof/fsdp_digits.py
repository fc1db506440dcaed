"""Accuracy on handwritten digits with FSDP2 on two machines: native HSDP, and `dgc.fsdp` with several methods.

On two machines, or twice on one, with --node-rank 0 and 1:

    PYTHONPATH=.:examples torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr HOST \
        --master-port 29500 tests/proof/fsdp_digits.py [EPOCHS]

All methods have the same steps, rate and initial parameters. Rank 0 prints, for each method, the accuracy of each
seed, the difference of the mean to native HSDP in points, and the bytes that a rank sends to other machines,
compared with a dense fp32 all-reduce. The last line is JSON.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from dgc.comm.torch_distributed import connect
from dgc.compression import DGCCompressor, PowerSGDCompressor
from dgc.fsdp import compress, local_mesh
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD
from digits import BATCH_SIZE, images_and_labels, network

Run = dict[str, float]
SEEDS = 3
METHODS: dict[str, Callable[[], Any] | None] = {
    "HSDP": None,
    "ratio 1": lambda: DGCCompressor(1.0, DGCSGDMemory(momentum=0.9)),
    "DGC 1 %": lambda: DGCCompressor(
        0.01, DGCSGDMemory(momentum=0.9), fp16_values=True, int32_indices=True, warmup_epochs=5
    ),
    "PowerSGD 4": lambda: PowerSGDCompressor(4, num_iters_per_step=2),
}


def train(transport: Any, mesh: DeviceMesh, compressor: Any, seed: int, epochs: int) -> tuple[Run, torch.Tensor]:
    """Train on 4/5 of the images. Return accuracy and bytes, and the parameters."""
    images, labels = images_and_labels()
    fold = torch.arange(len(labels)) % 5 == seed
    torch.manual_seed(seed)
    model: Any = network()
    for layer in model.children():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    for layer in model.children():
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    exchange = compress(model, compressor, transport=transport) if compressor else None
    optimizer = DGCSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    train_images, train_labels = images[~fold], labels[~fold]
    batch, generator = BATCH_SIZE * transport.size, torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        if exchange:
            exchange.begin_epoch(epoch)
        order = torch.randperm(len(train_labels), generator=generator)
        for start in range(0, len(order) - batch + 1, batch):
            own = order[start + transport.rank : start + batch : transport.size]
            optimizer.zero_grad()
            cross_entropy(model(train_images[own]), train_labels[own]).backward()
            optimizer.step()
        schedule.step()
    with torch.no_grad():
        correct = (model(images[fold]).argmax(1) == labels[fold]).float().mean()
    whole = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
    run = {"accuracy": 100 * float(correct)}
    if exchange:
        run |= {"bytes": exchange.meter.wire_bytes, "dense bytes": exchange.meter.dense_wire_bytes}
        exchange.close()
    return run, whole


def main(epochs: int) -> None:
    transport: Any = connect(hierarchical=True)
    flat = local_mesh(transport, "cpu")
    machines = transport.group_size("cross")
    square = init_device_mesh("cpu", (machines, transport.local_size), mesh_dim_names=("machine", "local"))
    table: dict[str, list[Run]] = {name: [] for name in METHODS}
    for seed in range(SEEDS):
        reference = torch.empty(0)
        for name, make in METHODS.items():
            run, whole = train(transport, flat if make else square, make and make(), seed, epochs)
            reference = reference if make else whole
            run["difference"] = float((whole - reference).norm() / reference.norm())
            table[name].append(run)
    if transport.rank == 0:
        show(table)
    dist.destroy_process_group()


def show(table: dict[str, list[Run]]) -> None:
    found = {}
    native = sum(run["accuracy"] for run in table["HSDP"]) / SEEDS
    for name, runs in table.items():
        points = sum(run["accuracy"] for run in runs) / SEEDS - native
        sent, dense = (sum(run.get(key, 0) for run in runs) / SEEDS for key in ("bytes", "dense bytes"))
        accuracies = " ".join(f"{run['accuracy']:6.2f}" for run in runs)
        factor = dense / sent if sent else 1.0
        print(
            f"{name:12} {accuracies}  {points:+.2f} points  {sent / 1e6:8.3f} MB sent  {factor:5.1f} times fewer"
        )
        different = max(run["difference"] for run in runs)
        found[name] = {"points": points, "factor": factor, "bytes": sent, "parameters": different}
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
