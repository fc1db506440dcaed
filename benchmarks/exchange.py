"""Time of one exchange of a model's gradients, for all methods in one run: here, or on a network of limited rate.

    python -m benchmarks.exchange --ranks 4 --model resnet50 --methods noop dense fp16 dgc dgc-sign-rice
    python -m benchmarks.exchange --hosts 4 --rate 100mbit 1gbit --methods noop horovod-fp16 dgc powersgd-2

Gradients are ready at the start and applied at the end, without forward and backward. `exchange` is the time from
the start of the first bucket until the last reply is decoded. `step` adds the update of the parameters. `noop`
exchanges nothing, and `update` only updates u and v of momentum correction: lower bounds for dense methods and for
DGC. Each time is the time of the slowest rank, as the median over repeats. `wait` is the time for which a rank
waits for replies. `horovod` and `horovod-fp16` are Horovod's own all-reduce of each tensor, with its default
fusion and cycle time: they have a launch of their own. Bytes are what one rank contributes (payload) and
sends (wire).

With --hosts (benchmarks.netlab), the bytes that a host's interface has sent in a step stand beside the meter's,
without 66 bytes of headers for each packet, and without what Horovod sends all the time; `noop` measures it.
`bound` is the time of the wire bytes at the rate that one TCP connection reached. `faster` compares with the
faster one of `fp16` and `horovod-fp16`, and `fewer` the bytes of the link. All ranks share the cores of this
machine, and without --hosts the "network" is memory: it shows the cost, not the gain. `benchmarks.figures` draws
the lines of JSON.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any, cast

import torch

import dgc.kernels as kernels
import dgc_datasets.torchvision_compat  # noqa: F401  (before torchvision)
from benchmarks._harness import add_methods, in_turns, options, print_json
from benchmarks._laboratory import Laboratory
from benchmarks._launches import add_options, begin, connected, on_networks, portions, run_methods
from benchmarks._step_times import Row, add_network, measured, merged, print_table
from dgc.comm import Transport
from dgc.comm.meter import TrafficMeter, all_reduce_wire_bytes
from dgc.comm.requests import Conversation
from dgc.core.bucket import Bucket
from dgc.core.protocol import Compressor, StatelessCompressor
from dgc.core.results import DenseResult, Reduced
from dgc.core.state import State, zeros
from dgc.kernels import PassInputs
from dgc.optim import DGCSGD, DistributedOptimizer, LocalOptimizer
from scripts.methods import COMPRESSORS, build

TAKES = "1 min, and 1 to 15 min for each rate of a network"
MODELS = ("resnet18", "resnet50", "vgg16")
GOSSIP = ("sgp", "sgp-fp16", "dpsgd")  # the whole model to one neighbour, without compressor and gradient
HOROVOD = ("horovod", "horovod-fp16")
LR, MOMENTUM = 1e-3, 0.9


class Noop(StatelessCompressor):
    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        yield from ()
        return Reduced(DenseResult(is_finite=True), state)


class Update(Compressor):
    """The update of u and v of momentum correction, and nothing else: it sends nothing."""

    def init(self, bucket: Bucket, size: int, rank: int) -> State:
        return State(size, rank, errors={"v": zeros(bucket)}, local={"u": zeros(bucket)})

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        u, v = state.local["u"], state.errors["v"]
        kernels.of(v).selection.accumulate_(PassInputs(bucket.gradients, u, v, MOMENTUM))
        yield from ()
        return Reduced(DenseResult(is_finite=True), state)


BOUNDS = {"noop": Noop, "update": Update}
GRADIENTS = (*BOUNDS, *COMPRESSORS)  # what DistributedOptimizer exchanges
NAMES = (*GRADIENTS, *GOSSIP, *HOROVOD)


def compressor(name: str, ratio: float) -> Compressor:
    """A method of GRADIENTS."""
    return BOUNDS[name]() if name in BOUNDS else cast(Compressor, build(name, ratio))


def parameters_of(model: str) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters of a model of torchvision by name, all zero."""
    from torchvision import models

    with torch.device("meta"):
        shapes = {name: p.shape for name, p in models.get_model(model).named_parameters()}
    return [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]


class Method:
    """One method with parameters of its own."""

    def __init__(self, name: str, settings: dict[str, Any], transport: Transport):
        named = parameters_of(settings["model"])
        self.name, self.parameters = name, [p for _, p in named]
        self.sgd: torch.optim.Optimizer = torch.optim.SGD(self.parameters, lr=LR, momentum=MOMENTUM)
        self.optimizer: DistributedOptimizer | LocalOptimizer | None = None
        if name in GRADIENTS:
            self.sgd = DGCSGD(self.parameters, lr=LR, momentum=MOMENTUM)
            exchanged = compressor(name, settings["ratio"])
            self.optimizer = DistributedOptimizer(self.sgd, named, exchanged, transport=transport)
        elif name in GOSSIP:
            self.optimizer = LocalOptimizer(self.sgd, named, build(name), transport=transport)
        self.meter = self.optimizer.meter if self.optimizer is not None else TrafficMeter(transport.local_size)

    def step(self) -> None:
        """Exchange the gradients, and apply the result."""
        if self.optimizer is None:
            self._step_of_horovod()
            return
        self.optimizer.step()  # gossip sends
        if self.name in GOSSIP:
            self.optimizer.zero_grad()  # and receives

    def close(self) -> None:
        if self.optimizer is not None:
            self.optimizer.close()

    def _step_of_horovod(self) -> None:
        """All-reduce each tensor, in reverse order as from backward."""
        import horovod.torch as hvd

        compression = hvd.Compression.fp16 if self.name.endswith("fp16") else hvd.Compression.none
        launched = []
        for i, p in reversed(list(enumerate(self.parameters))):
            tensor, context = compression.compress(p.grad)
            wire = all_reduce_wire_bytes(tensor.nbytes, hvd.size())
            self.meter.payload_bytes += tensor.nbytes
            self.meter.wire_bytes += wire
            self.meter.cross_wire_bytes += wire / hvd.local_size() if hvd.size() > hvd.local_size() else 0
            handle = hvd.allreduce_async_(tensor, name=f"{self.name}.{i}", op=hvd.Average)
            launched.append((p, handle, context))
        for p, handle, context in launched:
            p.grad = compression.decompress(hvd.synchronize(handle), context)
        start = perf_counter()
        self.sgd.step()
        self.meter.seconds["step"] += perf_counter() - start


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """What each rank does."""
    transport = connected("mpirun", horovods_own=bool(set(settings["methods"]) & set(HOROVOD)))
    methods = {name: Method(name, settings, transport) for name in settings["methods"]}
    generator = torch.Generator().manual_seed(transport.rank)
    shapes = [p.shape for p in next(iter(methods.values())).parameters]
    sets = [[torch.randn(s, generator=generator) * 1e-3 for s in shapes] for _ in range(settings["gradient_sets"])]

    def once(method: Method, number: int) -> Row:
        for p, gradient in zip(method.parameters, sets[number % len(sets)], strict=True):
            p.grad = gradient.clone()
        return measured(method.step, method.meter, transport)

    works = {name: partial(once, method) for name, method in methods.items()}
    found = merged(in_turns(works, settings["repeats"], settings["warmup"]), transport)
    for method in methods.values():
        method.close()
    about = {"threads": torch.get_num_threads(), "kernels": kernels.describe(torch.device("cpu"))}
    return {**about, "parameters": sum(shape.numel() for shape in shapes), "methods": found}


def measure_all(args: argparse.Namespace, ranks: int, laboratory: Laboratory | None) -> dict[str, Any]:
    launches = [("mpirun", names) for names in portions(args.methods, args.together, HOROVOD)]
    return run_methods("benchmarks.exchange", args, ranks, laboratory, launches)


def report(args: argparse.Namespace, ranks: int, found: dict[str, Any], network: dict[str, Any] | None) -> None:
    """Print a table and a line of JSON."""
    about = f"{found['parameters']:,} parameters, {ranks} ranks, {found['threads']} threads each"
    print(f"{args.model}: {about}, ratio {args.ratio}, {args.repeats} repeats, kernels {found['kernels']}")
    rows = {name: found["methods"][name] for name in args.methods}
    if network is not None:
        add_network(rows, network, "exchange_ms", lambda name: "noop", ("fp16", "horovod-fp16"))
    print_table(rows, network, ("exchange_ms", "step_ms"))
    settings = {"model": args.model, "ratio": args.ratio, "ranks": ranks, "network": network}
    print_json({"benchmark": "exchange", **settings, "methods": rows})


def main(argv: Sequence[str] | None = None) -> int:
    parser = options("benchmarks.exchange", __doc__, ratio=0.001)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    add_methods(parser, NAMES, ["noop", "dense", "fp16", "dgc"])
    parser.add_argument("--gradient-sets", type=int, default=3, help="different gradients that steps take in turn")
    add_options(parser)
    args = parser.parse_args(argv)
    if args.gradient_sets < 1:
        parser.error("--gradient-sets must be at least 1")
    return on_networks(args, measure_all, report)


if __name__ == "__main__":
    begin(work, main)
