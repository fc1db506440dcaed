"""Time of whole training steps, with real forward and backward passes that overlap with the exchange.

    python -m benchmarks.train_step --hosts 4 --rate 100mbit 1gbit --model resnet50
    python -m benchmarks.train_step --hosts 4 --rate 1gbit --model lstm --methods noop dense fp16 2bit
    python -m benchmarks.train_step --ranks 2 --model lm --methods noop ddp-fp16 dgc-sign-rice dgc-sign-rice@ddp
    python -m benchmarks.train_step --hosts 4 --rate 200mbit --model lm --methods fsdp-noop fsdp-bf16 4-8@fsdp

The models are torchvision's, with images; `lm`, a Transformer, and `lstm`, the LSTM of the PowerSGD study, with
tokens.

NAME             a method of `benchmarks.exchange`, in DistributedOptimizer or LocalOptimizer over Horovod
NAME@ddp         the same compressor as a communication hook of DistributedDataParallel (DDP), over Gloo
noop, ddp-noop   nothing is exchanged: a lower bound for all methods over Horovod and for DDP
horovod(-fp16)   horovod.torch.DistributedOptimizer, with its default fusion and cycle time
ddp, ddp-fp16, ddp-bf16, ddp-powersgd
                 DDP's all-reduce of fp32, and torch's own hooks; PowerSGD has rank 2
fsdp-noop        FSDP2 of `lm`, each layer a group: nothing is sent, each rank takes its own shard for all others
fsdp, fsdp-bf16  FSDP2's own collectives, over Gloo, whose reduce-scatter is an all-reduce with twice the bytes
fsdp-bf16-rows   as fsdp-bf16, with a reduce-scatter that sends each rank its row alone
8-8@fsdp, 4-8@fsdp
                 dgc.fsdp.quantize: bits of gradients and of weights

With FSDP2 all compute in fp32, since processors without instructions for bf16 are slow with it. The rows of bf16
send what `MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)` sends.

Methods over Horovod run under mpirun, methods of DDP and FSDP2 under torchrun, Horovod's own in a launch of their
own. Repeats are interleaved over the methods of a launch. `step` is the time from zero_grad until the parameters
are updated, of the slowest rank, as the median over repeats. `wait` is the part of it in which a rank waits for
replies, if the method is ours and not of FSDP2. The other columns are explained in `benchmarks.exchange`; `faster`
and `fewer` compare with the fastest of `ddp-fp16`, `ddp-bf16`, `horovod-fp16` and `fp16`, or of `fsdp-bf16` and
`fsdp-bf16-rows`. For DDP and its own hooks the bytes are counted on the link alone.

All ranks share the cores of this machine: with 4 ranks on 2 cores, forward and backward take about twice as long
as on hosts with a core each, so that more of an exchange hides behind them. The output is a table and a line of
JSON for each network.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dgc_datasets.torchvision_compat  # noqa: F401  (before torchvision)
from benchmarks._harness import add_methods, in_turns, options, print_json
from benchmarks._laboratory import Laboratory
from benchmarks._launches import add_options, begin, connected, on_networks, portions, run_methods
from benchmarks._step_times import Row, add_network, measured, merged, print_table
from benchmarks.ddp_step import TorchPowerSGD, torch_bf16, torch_fp16
from benchmarks.exchange import GOSSIP, GRADIENTS, HOROVOD, compressor
from dgc.comm import AllGather, AllToAll, ReduceScatter, Transport
from dgc.comm.meter import TrafficMeter
from dgc.comm.torch_distributed import exchange_parts
from dgc.ddp import compress
from dgc.fsdp import quantize
from dgc.optim import DGCSGD, DistributedOptimizer, LocalOptimizer
from dgc_models import LSTM
from scripts.methods import build

TAKES = "2 min, and 2 to 10 min for each rate of a network"
LR, MOMENTUM = 1e-4, 0.9
AT_DDP = "@ddp"
PLAIN_DDP = ("ddp-noop", "ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd")
OVER_DDP = (*PLAIN_DDP, *(f"{name}{AT_DDP}" for name in GRADIENTS if name != "noop"))
PLAIN_FSDP = ("fsdp-noop", "fsdp", "fsdp-bf16", "fsdp-bf16-rows")
QUANTIZED = {"8-8@fsdp": (8, 8), "4-8@fsdp": (4, 8)}  # bits of gradients and of weights
OVER_FSDP = (*PLAIN_FSDP, *QUANTIZED)
NAMES = (*GRADIENTS, *GOSSIP, *HOROVOD, *OVER_DDP, *OVER_FSDP)
OPPONENTS = ("ddp-fp16", "ddp-bf16", "horovod-fp16", "fp16")
FSDP_OPPONENTS = ("fsdp-bf16", "fsdp-bf16-rows")
SHOWN = """
    noop horovod horovod-fp16 fp16 dgc-fp32-int64 dgc-fp16-packed dgc-sign-rice powersgd-2-half 2bit scaled-sign
    int8 int4 sgp ddp-noop ddp ddp-fp16 ddp-bf16 ddp-powersgd dgc-fp16-packed@ddp dgc-sign-rice@ddp
    powersgd-2-half@ddp int8@ddp int4@ddp
""".split()
VOCABULARY, WIDTH, LAYERS, CONTEXT = 16384, 512, 6, 64
WORDS = 28869  # of WikiText-2, as in the PowerSGD study
MODELS = ("resnet18", "resnet50", "vgg16", "lm", "lstm")
OF_TOKENS = ("lm", "lstm")


class LanguageModel(nn.Module):
    """A causal Transformer: 27 million parameters, of which the tied embedding has 8 million."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers(self.embedding(tokens) + self.position, mask=self.mask, is_causal=True)
        return hidden @ self.embedding.weight.T


@dataclass(frozen=True)
class Work:
    """A model and its batch.

    Attributes:
        model: All ranks have the same parameters.
        loss: Runs the forward pass, given the model or its wrapper.
    """

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]


def make_work(name: str, batch: int, image: int, rank: int) -> Work:
    """A model with a batch of this rank.

    Args:
        name: One of MODELS.
        batch: Samples of this rank: images, or sequences of 64 tokens.
        image: Pixels in each direction.
        rank: Each rank has other samples.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(rank + 1)
    if name in OF_TOKENS:
        model: nn.Module = LanguageModel() if name == "lm" else LSTM(WORDS, width=650, layers=3, dropout=0.0)
        words = VOCABULARY if name == "lm" else WORDS
        inputs, targets = (torch.randint(words, (batch, CONTEXT), generator=generator) for _ in range(2))
    else:
        from torchvision import models

        model = models.get_model(name)
        inputs = torch.randn(batch, 3, image, image, generator=generator)
        targets = torch.randint(1000, (batch,), generator=generator)

    def loss(wrapped: nn.Module) -> Tensor:
        found = wrapped(inputs)
        logits = found[0] if isinstance(found, tuple) else found  # the LSTM has a state
        return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())

    return Work(model, loss)


@dataclass
class Method:
    """One method with a model of its own.

    Attributes:
        work: The model and its batch.
        module: The model, or the wrapper of it.
        optimizer: Its own, or the wrapper of it.
        meter: Its "step" phase is the update of the parameters, or with Horovod's optimizer all of `step()`.
        counts_step: Whether this phase is measured here.
        finish: Waits for what `optimizer.step()` has only begun.
    """

    work: Work
    module: nn.Module
    optimizer: Any
    meter: TrafficMeter
    counts_step: bool = True
    finish: Callable[[], None] | None = None

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.work.loss(self.module).backward()
        start = perf_counter()
        self.optimizer.step()
        if self.counts_step:
            self.meter.seconds["step"] += perf_counter() - start
        if self.finish is not None:
            self.finish()


def make(name: str, work: Work, ratio: float, transport: Transport) -> Method:
    """A method by its name."""
    if name in OVER_DDP:
        return _ddp(name, work, ratio, transport)
    if name in OVER_FSDP:
        return _fsdp(name, work, transport)
    named = list(work.model.named_parameters())
    parameters = [p for _, p in named]
    sgd = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)
    if name in GRADIENTS:
        dgcsgd = DGCSGD(parameters, lr=LR, momentum=MOMENTUM)
        ours = DistributedOptimizer(dgcsgd, named, compressor(name, ratio), transport=transport)
        return Method(work, work.model, ours, ours.meter, counts_step=False)
    if name in GOSSIP:
        gossip = LocalOptimizer(sgd, named, build(name), transport=transport)
        # the next zero_grad would wait otherwise, during the turn of another method
        finish = gossip.synchronize_messages
        return Method(work, work.model, gossip, gossip.meter, counts_step=False, finish=finish)
    import horovod.torch as hvd

    compression = hvd.Compression.fp16 if name.endswith("fp16") else hvd.Compression.none
    prefixed = [(f"{name}.{of}", p) for of, p in named]
    of_horovod = hvd.DistributedOptimizer(sgd, named_parameters=prefixed, compression=compression)
    return Method(work, work.model, of_horovod, TrafficMeter(transport.local_size))


def _ddp(name: str, work: Work, ratio: float, transport: Transport) -> Method:
    model = DistributedDataParallel(work.model)
    parameters = list(work.model.parameters())
    if name.endswith(AT_DDP):
        dgcsgd = DGCSGD(parameters, lr=LR, momentum=MOMENTUM)
        exchange = compress(model, compressor(name.removesuffix(AT_DDP), ratio), dgcsgd, transport=transport)
        return Method(work, model, dgcsgd, exchange.meter)
    TORCH_HOOKS[name](model)
    sgd = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)
    return Method(work, model, sgd, TrafficMeter(transport.local_size))


def _noop_hook(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


TORCH_HOOKS: dict[str, Callable[[DistributedDataParallel], object]] = {
    "ddp-noop": lambda model: model.register_comm_hook(None, _noop_hook),
    "ddp": lambda model: None,
    "ddp-fp16": torch_fp16,
    "ddp-bf16": torch_bf16,
    "ddp-powersgd": lambda model: TorchPowerSGD(2, model),
}


def _fsdp(name: str, work: Work, transport: Transport) -> Method:
    assert isinstance(work.model, LanguageModel)
    # the all-gather of bf16 rows converts by itself
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if "bf16" in name else None)
    layers = [fully_shard(layer, mp_policy=policy) for layer in work.model.layers.layers]
    fully_shard(work.model, mp_policy=policy)
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
    meter = TrafficMeter(transport.local_size)
    if name in QUANTIZED:
        meter = quantize(work.model, *QUANTIZED[name]).meter
    else:
        for module in work.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(Gathered(name, meter, transport))  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(Reduced(name, meter, transport))  # type: ignore[arg-type]
    sgd = torch.optim.SGD(work.model.parameters(), lr=LR, momentum=MOMENTUM)
    return Method(work, work.model, sgd, meter)


@dataclass
class Collective:
    """What FSDP2 calls in place of its own collective, in all methods but ours."""

    name: str
    meter: TrafficMeter
    transport: Transport

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gathered(Collective):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        if self.name == "fsdp-noop":
            output_tensor.view(group.size(), -1).copy_(input_tensor.clone())  # the input is a part of the output
            return
        dtype = torch.bfloat16 if "bf16" in self.name else torch.float32
        sent, arrived = input_tensor.to(dtype), output_tensor.to(dtype)
        self.meter.count(AllGather(sent), self.transport)
        dist.all_gather_single(arrived, sent, group)
        if arrived is not output_tensor:
            output_tensor.copy_(arrived)


class Reduced(Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        rows = input_tensor.view(group.size(), -1)
        if self.name == "fsdp-noop":
            output_tensor.copy_(rows[group.rank()])
        elif self.name == "fsdp-bf16-rows":
            self.meter.count(AllToAll(input_tensor, (rows.shape[1],) * len(rows)), self.transport)
            arrived = torch.empty_like(rows)
            for message in exchange_parts(arrived.unbind(), rows.unbind(), group, tag=0):
                message.wait()
            torch.mean(arrived, 0, out=output_tensor)
        else:
            self.meter.count(ReduceScatter(input_tensor), self.transport)
            dist.reduce_scatter_single(output_tensor, input_tensor, op, group)


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """What each rank does."""
    torch.set_num_threads(settings["threads"])
    torch.set_flush_denormal(True)  # a batch that is learned by heart has denormal gradients, which are slow
    transport = connected(settings["launcher"], horovods_own=bool(set(settings["methods"]) & set(HOROVOD)))
    methods = {}
    for name in settings["methods"]:
        given = make_work(settings["model"], settings["batch"], settings["image"], transport.rank)
        methods[name] = make(name, given, settings["ratio"], transport)
    parameters = sum(p.numel() for p in given.model.parameters())

    def once(method: Method, number: int) -> Row:
        return measured(method.step, method.meter, transport)

    works = {name: partial(once, method) for name, method in methods.items()}
    found = merged(in_turns(works, settings["repeats"], settings["warmup"]), transport)
    for method in methods.values():
        if isinstance(method.optimizer, DistributedOptimizer | LocalOptimizer):
            method.optimizer.close()
    return {"parameters": parameters, "methods": found}


def measure_all(args: argparse.Namespace, ranks: int, laboratory: Laboratory | None) -> dict[str, Any]:
    ddp, fsdp = ([name for name in args.methods if name in of] for of in (OVER_DDP, OVER_FSDP))
    others = [name for name in args.methods if name not in (*OVER_DDP, *OVER_FSDP)]
    launches = [("mpirun", names) for names in portions(others, args.together, HOROVOD)]
    launches += [("torchrun", names) for names in (*portions(ddp, args.together), *portions(fsdp, args.together))]
    return run_methods("benchmarks.train_step", args, ranks, laboratory, launches)


def report(args: argparse.Namespace, ranks: int, found: dict[str, Any], network: dict[str, Any] | None) -> None:
    """Print a table and a line of JSON."""
    size = "" if args.model in OF_TOKENS else f" of {args.image} pixels"
    print(
        f"{args.model}: {found['parameters']:,} parameters, {ranks} ranks, {args.threads} threads each, batch "
        f"{args.batch}{size} per rank, ratio {args.ratio}, {args.repeats} repeats"
    )
    rows = {name: found["methods"][name] for name in args.methods}
    if network is not None:
        sharded = {name: rows[name] for name in rows if name in OVER_FSDP}
        others = {name: rows[name] for name in rows if name not in OVER_FSDP}
        add_network(sharded, network, "step_ms", lambda name: "fsdp-noop", FSDP_OPPONENTS)
        # DDP sends the model's buffers in every step. Horovod's thread sends all the time.
        idle = {name: "ddp-noop" if name in OVER_DDP else "noop" for name in others}
        add_network(others, network, "step_ms", idle.__getitem__, OPPONENTS, per_step=("ddp-noop",))
    print_table(rows, network, ("step_ms",))
    settings = {"model": args.model, "ratio": args.ratio, "ranks": ranks, "batch": args.batch, "network": network}
    print_json({"benchmark": "train_step", **settings, "methods": rows})


def main(argv: Sequence[str] | None = None) -> int:
    parser = options("benchmarks.train_step", __doc__)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--batch", type=int, default=4, help="of a rank: images, or sequences of 64 tokens")
    parser.add_argument("--image", type=int, default=128, help="pixels in each direction")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--ratio", type=float, default=0.001)
    add_methods(parser, NAMES, SHOWN)
    add_options(parser)
    args = parser.parse_args(argv)
    if set(args.methods) & set(OVER_FSDP) and (args.model, args.ranks_per_host) != ("lm", 1):
        raise SystemExit("methods of FSDP2 are measured with --model lm and one rank on each host")
    return on_networks(args, measure_all, report)


if __name__ == "__main__":
    begin(work, main)
