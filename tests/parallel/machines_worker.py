"""Runs on every rank of two machines: training on two levels, with each of some methods. Findings go to a file."""

import hashlib
import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dgc.comm.connect import connect
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DGCCompressor, NonFiniteGradientError, PowerSGDCompressor, ThresholdCompressor
from dgc.memory import ClipByGlobalNorm, DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer

METHODS: dict[str, Any] = {
    "dgc": lambda: DGCCompressor(0.01, DGCSGDMemory(gradient_clipping=ClipByGlobalNorm(5.0)), int32_indices=True),
    "powersgd": lambda: PowerSGDCompressor(1, num_iters_per_step=4),
    "2bit": lambda: ThresholdCompressor(threshold=0.01),
}


def train(transport: Any, compression: Any, hierarchical: str, steps: int = 12) -> Any:
    """The optimizer and a hash of the model. The tensors make shares without a matrix, and an empty one."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(32, 60), torch.nn.BatchNorm1d(60), torch.nn.ReLU(), torch.nn.Linear(60, 10)]
    model = torch.nn.Sequential(*layers)
    optimizer = DistributedOptimizer(
        DGCSGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4),
        model.named_parameters(),
        compression,
        transport=transport,
        bucket_mb=0.003,
        nonfinite="raise",
        hierarchical=hierarchical,
    )
    generator = torch.Generator().manual_seed(100 + transport.rank)
    message = ""
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(8, 32, generator=generator)
        if step == 5 and transport.rank == 3:
            inputs[0, 0] = float("inf")
        model(inputs).square().mean().backward()
        try:
            optimizer.step()
        except NonFiniteGradientError as error:
            message = str(error)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer.close()
    return optimizer, message, hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def expected(name: str, transport: Any) -> str:
    """The model after the same training on simulated ranks."""
    return str(train(transport, METHODS[name](), "auto")[2])


if __name__ == "__main__":
    warnings.simplefilter("error")
    transport, found = connect(hierarchical="auto"), {name: dict[str, Any]() for name in METHODS}
    for name, make in METHODS.items():
        for mode in ("auto", "off"):
            optimizer, message, weights = train(transport, make(), mode)
            found[name][mode] = {
                "place": None if optimizer.place is None else vars(optimizer.place),
                "message": message,
                "model": weights,
                "between": optimizer.meter.cross_wire_bytes,
            }
        if transport.rank == 0:
            alike = LockstepWorld(4, 2).run(partial(expected, name))
            found[name]["lockstep"] = alike[0]
    Path(sys.argv[1], f"rank{transport.rank}.json").write_text(json.dumps(found))
