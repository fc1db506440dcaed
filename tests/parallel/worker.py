"""Runs on every rank of a group: DistributedOptimizer and the transports. Each function returns what it found."""

import atexit
import os
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from optim import nets
from optim.nets import dgc, dgc_sgd, wrap
from parallel.found import Finding, digest, told
from states import assert_equal

from dgc import kernels, paper
from dgc.comm import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    ReduceScatter,
    RunningConversation,
    TrafficMeter,
    all_gather_object,
    broadcast_object,
)
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import (
    BF16Compressor,
    ChunkCompressor,
    DenseCompressor,
    DGCCompressor,
    FP16Compressor,
    NonFiniteGradientError,
    ThresholdCompressor,
    TwoPhaseCompressor,
)
from dgc.kernels.library import supported_isas
from dgc.memory import ClipByGlobalNorm, DGCSGDMemory, ResidualMemory
from dgc.optim import DGCSGD, DistributedOptimizer, broadcast_parameters
from dgc.wire import CastValues, Int8Values, RiceIndices


def started(transport: Any) -> list[Any]:
    """What the network does for requests in a group of one rank: operations of Gloo, or Horovod's handles."""
    own = torch.arange(4.0)
    sent = (AllReduce(own), AllGather(own), AllToAll(own, (4,)), ReduceScatter(own), Broadcast(own, 0))
    work = transport.launch("started", sent)
    operations = getattr(work, "operations", None)
    found = [handle for _, handle in work if handle is not None] if operations is None else sum(operations, [])
    transport.wait(work)
    return found


def requests(transport: Any) -> None:
    """Every kind of request, in every group: replies and bytes are those of the lockstep transport."""

    def conversation(rank: int, size: int) -> Any:
        ones = torch.arange(2 * size, dtype=torch.float32) + rank
        bytes_ = torch.full((3,), rank, dtype=torch.uint8)
        first = yield (AllReduce(ones.clone(), "sum"), AllReduce(ones.clone(), "mean"), AllGather(bytes_))
        second = yield (AllReduce(ones.clone(), "min"), AllReduce(ones.clone(), "max"))
        third = yield (AllToAll(ones.clone(), (2,) * size), ReduceScatter(ones.clone(), "sum"))
        right, left = (rank + 1) % size, (rank - 1) % size
        exchange = Exchange({right: ones[: rank + 1].clone()}, {left: torch.empty(left + 1)})
        fourth = yield (Broadcast(ones.clone(), size - 1), exchange)
        fifth = yield (AllReduce(ones.clone(), "sum", "local"), AllGather(bytes_, "cross"))
        return [first, second, third, fourth, fifth]

    rank, size = transport.rank, transport.size
    world = LockstepWorld(size)
    expected = world.converse("all", [conversation(r, size) for r in range(size)])[rank]
    meter = TrafficMeter()
    for _ in range(2):  # a name is used again
        replies = RunningConversation("all", conversation(rank, size), transport, meter).finish()
        torch.testing.assert_close(replies, expected, rtol=0, atol=0)
    assert meter.payload_bytes == 2 * world.meters[rank].payload_bytes
    assert all_gather_object(transport, "x" * rank) == ["x" * r for r in range(size)]
    assert broadcast_object(transport, {"from": rank}, root=size - 1) == {"from": size - 1}


def gathered(transport: Any) -> None:
    """A run that loads the states of all ranks from rank 0 has the bits of the run that gathered them."""
    model = nets.net()
    optimizer = wrap(model, transport, dgc_sgd, compression=dgc(0.1))
    nets.train(model, optimizer, range(3), transport.rank)
    states = optimizer.gather_state()
    assert (states is None) == (transport.rank > 0)
    own, saved = optimizer.compression_state_dict(), nets.values(model)
    inner = deepcopy(optimizer.state_dict())
    nets.train(model, optimizer, range(3, 6), transport.rank)
    again = nets.net()
    other = wrap(again, transport, dgc_sgd, compression=dgc(0.1))
    again.load_state_dict(saved)
    other.load_state_dict(inner)
    other.load_gathered(states)
    assert_equal(other.compression_state_dict(), own)
    nets.train(again, other, range(3, 6), transport.rank)
    nets.assert_same(again, model, exactly=True)
    assert other.error_norm() > 0


def clipped(ratio: float, **options: Any) -> DGCCompressor:
    memory = DGCSGDMemory(0.9, nesterov=True, gradient_clipping=ClipByGlobalNorm(5.0))
    return DGCCompressor(ratio, memory, **options)


def compressors(point_to_point: bool = False) -> dict[str, Callable[[], Any]]:
    small: dict[str, Any] = {"fp16_values": True, "int32_indices": True, "warmup_epochs": 2}
    scattered: dict[str, Any] = {"exchange": "reduce_scatter", "values": Int8Values(), "indices": RiceIndices()}
    found: dict[str, Callable[[], Any]] = {
        "dense": DenseCompressor,
        "fp16": FP16Compressor,
        "bf16": BF16Compressor,
        "residual": lambda: DGCCompressor(0.01, ResidualMemory()),
        "dgc": lambda: dgc(0.01),
        "dgc-wire": lambda: clipped(0.001, **small),
        "reduce-scatter": lambda: dgc(0.01, **scattered),
        "8 bits": TwoPhaseCompressor,
        "4 bits": lambda: TwoPhaseCompressor(4, 64, 8),
        "chunks": lambda: ChunkCompressor(0.01, DGCSGDMemory(0.9)),
        "paper-dgc": lambda: paper.DGC(0.01),
        "paper-2bit": lambda: paper.Threshold(2, 0.01),
    }
    if point_to_point:
        found["gtopk"] = lambda: dgc(0.01, exchange="gtopk", dense_values="int8")
    return found


def train(
    transport: Any,
    compression: Any,
    steps: int,
    hidden: int = 300,
    bucket_mb: float = 0.02,
    nonfinite: str = "skip",
    bad: int | None = None,
) -> Finding:
    """What a model becomes on data of this rank's own. One rank alone uses a layer, in each step another.

    Args:
        bad: The step in which the last rank has NaN.
    """
    torch.manual_seed(3)
    layers = [torch.nn.Linear(32, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 40), torch.nn.Linear(40, 10)]
    model = torch.nn.ModuleList([torch.nn.Sequential(*layers), torch.nn.Linear(32, 10)])
    broadcast_parameters(model.state_dict(), transport=transport)
    corrected = getattr(compression, "correction", None)
    nesterov = corrected is not None and corrected.nesterov
    inner = DGCSGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4, nesterov=nesterov)
    options = {"transport": transport, "bucket_mb": bucket_mb, "nonfinite": nonfinite}
    optimizer = DistributedOptimizer(inner, model.named_parameters(), compression, **options)
    generator = torch.Generator().manual_seed(100 + transport.rank)
    weights = torch.randn(32, 10, generator=torch.Generator().manual_seed(5))
    messages = []
    for step in range(steps):
        if step % 5 == 0:
            optimizer.begin_epoch(step // 5)
        inputs = torch.randn(8, 32, generator=generator)
        if step == bad and transport.rank == transport.size - 1:
            inputs[0, 0] = float("nan")
        optimizer.zero_grad()
        outputs = model[0](inputs)
        if transport.rank == step % transport.size:
            outputs = outputs + model[1](inputs)
        torch.nn.functional.cross_entropy(outputs, (inputs @ weights).argmax(1)).backward()
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            try:
                optimizer.step()
            except NonFiniteGradientError as error:
                messages.append(str(error))
    optimizer.close()
    return {
        "model": digest(model.parameters()),
        "finite": all(p.isfinite().all() for p in model.parameters()) and optimizer.error_norm() < 1e6,
        "dropped": optimizer.dropped_steps,
        "messages": messages,
    }


def every_compressor(transport: Any) -> Finding:
    """NaN on the last rank at one step: every rank drops it, or raises the same error."""
    return {
        f"{name} {policy}": train(transport, make(), steps=12, nonfinite=policy, bad=6)
        for name, make in compressors(transport.point_to_point).items()
        for policy in ("skip", "raise")
    }


def horovods_compressions(transport: Any) -> Finding:
    import horovod.torch as hvd

    compressions = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}
    return {name: train(transport, compression, steps=12) for name, compression in compressions.items()}


def train_with_dgc(transport: Any, steps: int) -> str:
    return str(train(transport, compressors()["dgc-wire"](), steps)["model"])


def on_backends(transport: Any, steps: int, hidden: int, *modes: str) -> Finding:
    """The model that each backend leads to, and on a different instruction set per rank ("mixed").

    Indices in a Rice code, fp16 values, clipping, Nesterov and a warm-up of the ratio pass through every kernel.
    """
    found: Finding = {}
    for mode in modes:
        supported = supported_isas()
        isa = {0: "avx2", 1: "portable"}.get(transport.rank, supported[-1]) if mode == "mixed" else ""
        os.environ["DGC_KERNELS_ISA"] = isa if isa in supported else ""
        kernels.use("native" if mode == "mixed" else mode)
        kernels._backend.cache_clear()
        used = kernels.describe(torch.device("cpu"))
        compression = clipped(0.01, values=CastValues("fp16"), indices=RiceIndices(), warmup_epochs=3)
        found[mode] = {**train(transport, compression, steps, hidden, bucket_mb=0.06), "kernels": used}
    os.environ["DGC_KERNELS_ISA"] = ""
    kernels.use("auto")
    kernels._backend.cache_clear()
    return found


def interpreted(transport: Any) -> Finding:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    return on_backends(transport, 200, 24, "native", "triton")


def other_settings(transport: Any) -> str:
    """The last rank with another threshold: every rank is told which setting differs."""
    threshold = 0.25 if transport.rank == transport.size - 1 else 0.5
    compression = ThresholdCompressor(threshold=threshold)
    return told(lambda: wrap(torch.nn.Linear(4, 8), transport, compression=compression), ValueError)


def ratios_of_a_step(transport: Any) -> Finding:
    """begin_epoch on one rank only: ratios differ, and with them the payloads' sizes, or even the collectives."""
    found = {}
    last = transport.rank == transport.size - 1
    for name, (numel, ratios) in {
        "sizes": (1000, [0.25, 0.125, 0.125]),
        "one size": (100, [0.006, 0.01, 0.01]),
        "dense": (1000, [1.0, 0.125, 0.125]),  # ends Horovod: the last
    }.items():
        model = torch.nn.Linear(numel, 1, bias=False)
        compression = dgc(ratios[-1], warmup_epochs=2, warmup_coeff=ratios)
        optimizer = wrap(model, transport, dgc_sgd, compression=compression)
        optimizer.begin_epoch(int(last))
        model(torch.ones(1, numel)).sum().backward()
        found[name] = told(optimizer.step, RuntimeError)
        optimizer.close()
    from dgc.comm import horovod

    atexit.unregister(horovod._meet_at_exit)  # it waits 10 s for a rank that waits until this one has ended
    return found


def state_initialisation(transport: Any) -> bool:
    """hvd.broadcast_optimizer_state leaves the weights alone. All of it with Horovod's own words."""
    import horovod.torch as hvd

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 8)
    before = model.weight.detach().clone()
    inner = DGCSGD(model.parameters(), lr=0.8, momentum=0.9, weight_decay=0.01)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), dgc(0.5), op=hvd.Average)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return torch.equal(model.weight, before)
