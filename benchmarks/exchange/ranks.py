"""What each rank of `benchmarks.exchange` does. `benchmarks.launches` starts it."""

import os
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch

import dgc.kernels as kernels
from benchmarks.exchange.methods import GOSSIP, HOROVOD, METHODS, parameters_of
from benchmarks.launches import settings_of_rank, write_result
from benchmarks.step_times import Row, measured, merged
from dgc.comm import Transport, all_gather_object
from dgc.comm.meter import TrafficMeter, all_reduce_wire_bytes
from dgc.optim import DGCSGD, DistributedOptimizer, LocalOptimizer

GRADIENT_SETS = 3
LR, MOMENTUM = 1e-3, 0.9


class Method(Protocol):
    """One method with parameters of its own."""

    parameters: list[torch.nn.Parameter]
    meter: TrafficMeter  # "step" of its seconds is the update of the parameters

    def step(self) -> None:
        """Exchange the gradients in `parameters`, and apply the result."""


class Compressed:
    def __init__(self, name: str, settings: dict[str, Any], transport: Transport):
        named = parameters_of(settings["model"])
        self.parameters = [p for _, p in named]
        sgd = DGCSGD(self.parameters, lr=LR, momentum=MOMENTUM)
        compressor = METHODS[name](settings["ratio"])
        self.optimizer = DistributedOptimizer(sgd, named, compressor, transport=transport)
        self.meter = self.optimizer.meter

    def step(self) -> None:
        self.optimizer.step()


class Neighbours:
    def __init__(self, name: str, settings: dict[str, Any], transport: Transport):
        named = parameters_of(settings["model"])
        self.parameters = [p for _, p in named]
        sgd = torch.optim.SGD(self.parameters, lr=LR, momentum=MOMENTUM)
        self.optimizer = LocalOptimizer(sgd, named, GOSSIP[name](), transport=transport)
        self.meter = self.optimizer.meter

    def step(self) -> None:
        self.optimizer.step()  # sends
        self.optimizer.zero_grad()  # receives


class OfHorovod:
    """Horovod's own all-reduce, with a tensor for each parameter, in reverse order as from backward."""

    def __init__(self, name: str, settings: dict[str, Any], transport: Transport):
        import horovod.torch as hvd

        self.hvd, self.name, self.size = hvd, name, hvd.size()
        self.parameters = [p for _, p in parameters_of(settings["model"])]
        self.sgd = torch.optim.SGD(self.parameters, lr=LR, momentum=MOMENTUM)
        self.compression = hvd.Compression.fp16 if name.endswith("fp16") else hvd.Compression.none
        self.meter = TrafficMeter(transport.local_size)

    def step(self) -> None:
        launched = []
        for i, p in reversed(list(enumerate(self.parameters))):
            tensor, context = self.compression.compress(p.grad)
            self._count(tensor.nbytes)
            handle = self.hvd.allreduce_async_(tensor, name=f"{self.name}.{i}", op=self.hvd.Average)
            launched.append((p, handle, context))
        for p, handle, context in launched:
            p.grad = self.compression.decompress(self.hvd.synchronize(handle), context)
        start = perf_counter()
        self.sgd.step()
        self.meter.seconds["step"] += perf_counter() - start

    def _count(self, payload: int) -> None:
        wire = all_reduce_wire_bytes(payload, self.size)
        self.meter.payload_bytes += payload
        self.meter.wire_bytes += wire
        self.meter.cross_wire_bytes += wire / self.meter.local_size if self.size > self.meter.local_size else 0


def make(name: str, settings: dict[str, Any], transport: Transport) -> Method:
    kinds: list[tuple[Any, Callable[..., Method]]] = [
        (METHODS, Compressed),
        (GOSSIP, Neighbours),
        (HOROVOD, OfHorovod),
    ]
    (kind,) = [kind for names, kind in kinds if name in names]
    return kind(name, settings, transport)


def main() -> None:
    settings = settings_of_rank()
    if set(settings["methods"]) & set(HOROVOD):
        # before Horovod is loaded by the transport, which has other defaults
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(128 * 2**20))
        os.environ.setdefault("HOROVOD_CYCLE_TIME", "1")
        import warnings

        warnings.filterwarnings("ignore", "Horovod's fusion is on")
    from dgc.comm.horovod import connect

    transport = connect(point_to_point=True)
    methods = {name: make(name, settings, transport) for name in settings["methods"]}
    generator = torch.Generator().manual_seed(transport.rank)
    shapes = [p.shape for p in next(iter(methods.values())).parameters]
    sets = [[torch.randn(s, generator=generator) * 1e-3 for s in shapes] for _ in range(settings["gradient_sets"])]
    found: dict[str, list[Row]] = {name: [] for name in methods}
    for repeat in range(settings["warmup"] + settings["repeats"]):
        for name, method in methods.items():
            for p, gradient in zip(method.parameters, sets[repeat % len(sets)], strict=True):
                p.grad = gradient.clone()
            row = measured(method.step, method.meter, transport)
            if repeat >= settings["warmup"]:
                found[name].append(row)
    everyone = all_gather_object(transport, found)
    for method in methods.values():
        if isinstance(method, Neighbours | Compressed):
            method.optimizer.close()
    if transport.rank == 0:
        write_result(
            {
                "parameters": sum(shape.numel() for shape in shapes),
                "threads": torch.get_num_threads(),
                "kernels": kernels.describe(torch.device("cpu")),
                "methods": {name: merged([rank[name] for rank in everyone]) for name in methods},
            }
        )


if __name__ == "__main__":
    main()
