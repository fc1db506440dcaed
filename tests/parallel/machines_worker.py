"""Runs on every rank of two machines: training on two levels, with each of some methods."""

import time
from functools import partial
from typing import Any

import torch
from optim import nets
from parallel.found import digest
from torch.distributed import is_initialized
from torch.nn.parallel import DistributedDataParallel

from dgc.comm.lockstep import LockstepWorld
from dgc.comm.requests import AllReduce
from dgc.compression import (
    DGCCompressor,
    NonFiniteGradientError,
    PowerSGDCompressor,
    ThresholdCompressor,
    TwoPhaseCompressor,
)
from dgc.ddp import compress
from dgc.memory import ClipByGlobalNorm, DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer

METHODS: dict[str, Any] = {
    "dgc": lambda: DGCCompressor(
        0.05, DGCSGDMemory(0.9, gradient_clipping=ClipByGlobalNorm(5.0)), int32_indices=True
    ),
    "powersgd": lambda: PowerSGDCompressor(1, num_iters_per_step=4),
    "2bit": lambda: ThresholdCompressor(threshold=0.01),
    "4 bits": lambda: TwoPhaseCompressor(4),
}


def train(transport: Any, compression: Any, hierarchical: str, through: str = "step()") -> Any:
    """What exchanges the gradients, the message of a dropped step, and a hash of the model.

    The tensors make shares without a matrix, and an empty one.

    Args:
        transport: Connects the ranks.
        compression: The compressor.
        hierarchical: As in DistributedOptimizer.
        through: "step()" and "synchronize()" of DistributedOptimizer, or "DDP".
    """
    torch.manual_seed(3)
    first, last = torch.nn.Linear(32, 100, bias=False), torch.nn.Linear(100, 10)
    model = torch.nn.Sequential(first, torch.nn.BatchNorm1d(100), torch.nn.ReLU(), last)
    inner = DGCSGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    options = {"transport": transport, "bucket_mb": 0.005, "nonfinite": "raise", "hierarchical": hierarchical}
    forward: Any = model
    if through == "DDP":
        forward = DistributedDataParallel(model)
        exchange: Any = compress(forward, compression, inner, **options)
    else:
        exchange = DistributedOptimizer(inner, model.named_parameters(), compression, **options)
    generator = torch.Generator().manual_seed(100 + transport.rank)
    message = ""
    for step in range(8):
        inner.zero_grad() if through == "DDP" else exchange.zero_grad()
        inputs = torch.randn(8, 32, generator=generator)
        if step == 5 and transport.rank == 3:
            inputs[0, 0] = float("inf")
        try:
            forward(inputs).square().mean().backward()
            if through == "synchronize()":
                exchange.synchronize()
            if through == "step()":
                exchange.step()
            else:
                inner.step()
        except NonFiniteGradientError as error:
            message = str(error)
    if through != "DDP":
        exchange.close()
    return exchange, message, digest(model.parameters())


def in_process_set(rank: int, compression: Any = None, **options: Any) -> str:
    """A hash of the model after some steps on the data of a rank."""
    model = nets.net()
    optimizer = nets.wrap(model, make=nets.dgc_sgd, compression=compression, **{"transport": None, **options})
    nets.train(model, optimizer, range(4), rank)
    optimizer.close()
    return digest(model.parameters())


def process_set(transport: Any) -> dict[str, str]:
    """Training in one of Horovod's process sets and outside of it, and the same on simulated ranks."""
    import horovod.torch as hvd

    members, rank = [0, 3], transport.rank
    own = in_process_set(rank, nets.dgc(), process_set=hvd.add_process_set(members))
    if rank in members:
        alike = LockstepWorld(2).run(lambda t: in_process_set(members[t.rank], nets.dgc(), transport=t))[0]
    else:
        alike = in_process_set(rank, transport=nets.alone())
    return {"own": own, "alike": alike}


def expected(name: str, transport: Any) -> str:
    """The model after the same training on simulated ranks."""
    return str(train(transport, METHODS[name](), "auto")[2])


def every_method(transport: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {name: {} for name in METHODS}
    for name, make in METHODS.items():
        for mode in ("auto", "off") if name == "dgc" else ("auto",):
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
        if is_initialized():
            modes = [train(transport, make(), "auto", through) for through in ("synchronize()", "DDP")]
            found[name]["ddp"] = [{"message": message, "model": model} for _, message, model in modes]
    return found


def one_machine_ends_first(transport: Any) -> None:
    """Its exit must not end a message of the other machine."""
    if transport.rank > 1:
        time.sleep(1.0)
    transport.wait(transport.launch("last", (AllReduce(torch.ones(1), "sum", group="local"),)))
