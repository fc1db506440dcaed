"""Time to encode and to decode by every method, compared with the memory that must be moved.

    python -m benchmarks.methods [--elements 25 100] [--tensors 24] [--ranks 4] [--threads 2] [--methods qsgd dgc]
    python -m benchmarks.methods --models resnet50 transformer-big --ranks 2 --methods dense fp16 dgc powersgd-2
    python -m benchmarks.methods --isas avx512 avx2 portable --busy

The model has --elements million elements in --tensors equal matrices, or the shapes of a model:

resnet18           for CIFAR (He et al. 2016): the first experiment of the PowerSGD paper
lstm               three layers of 650, a vocabulary of 28,869 in one shared embedding: the second one
resnet50           torchvision's (He et al. 2016): 25,557,032 parameters, 102 MB
transformer-big    configs/wmt16/big.py (Vaswani et al. 2017): 209,125,376 parameters, 837 MB

The conversations of one rank of --ranks run without a transport, by buckets of 25 MB. The replies to its requests
are copies of what it sends, made outside the measured time.

Each method has a row for each instruction set of --isas, which take turns in each round.

payload   bytes that the rank contributes per step. fewer: how many times fewer it sends than dense fp32
state     bytes of error states and momenta per element, which it keeps from step to step
encode    from the gradient to the last request. Floor: the time to read the gradient, to read and write each error
          state and momentum, to write what is sent, and to read what is received before the last request
decode    from the last replies to the mean in the bucket. Floor: the time to read them, and to fill the bucket
floors    memory that is read and written in turn moves at the rate of v.add_(g), 12 bytes per element; what is
          only written at the rate of a fill, what is only read at the rate of a sum
peer      the strongest known program for both, as a multiple of ours: torch's hooks, torch.topk with error
          feedback, or the definition of the method in plain PyTorch

ns are nanoseconds per element of both, us microseconds per tensor. With --busy, times are the least of all rounds
on the CPU clock of one thread, which other programs disturb little. docs/results.md has the reason of each ratio
above 3.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from math import isqrt
from time import perf_counter, thread_time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import dgc.kernels as kernels
from benchmarks._harness import Table, add_methods, in_turns, middle, options, print_json, ratio
from benchmarks.exchange import parameters_of as parameters_of_torchvision
from benchmarks.step_overhead import Eager, Stateful
from dgc.advisor.cost import AlikeRanks
from dgc.comm.meter import all_reduce_wire_bytes, bytes_of
from dgc.comm.requests import next_requests
from dgc.compression import Route, Rule
from dgc.core.bucket import Bucket
from dgc.engine.buckets import keep_states, plan_buckets
from dgc.kernels.library import ISAS, choose_isa
from dgc_models import resnet18, transformer_big
from dgc_training.config import load
from scripts.methods import COMPRESSORS, build

TAKES = "8 min"
CODES = """
    fp16 bf16 2bit 1bit 2bit-gather 2bit-scatter 2bit-adaptive signsgd signum scaled-sign
    int8 int4 qsgd blockwise
""".split()
SPARSE = """
    dgc dgc-1-percent dgc-sign-rice dgc-int8-rice topk threshold-v chunks dgc-residual sparseloco
""".split()
POWERSGD = ["powersgd-1", "powersgd-2", "powersgd-4"]
DEFAULT = [*CODES, *SPARSE, *POWERSGD]
NAMES = [*DEFAULT, *(name for name in COMPRESSORS if name not in DEFAULT)]
MODELS = ("resnet18", "lstm", "resnet50", "transformer-big")
MILLION = 10**6
BUCKET_MB = 25.0
Clock = Callable[[], float]


class Method:
    """The buckets of a method on the last of some ranks, whose replies come from equal ranks."""

    def __init__(self, name: str, tensors: Sequence[tuple[str, Tensor]], ranks: int, clock: Clock = perf_counter):
        method = build(name)
        method = getattr(method, "compression", method)
        route = method if isinstance(method, Route) else Route([Rule(method)])
        self.plans = plan_buckets(tensors, route.compressor_for, BUCKET_MB, "bucket")
        keep_states(self.plans, ranks, ranks - 1)
        self.numel = sum(plan.bucket.numel for plan in self.plans)
        self._ranks, self._clock = AlikeRanks(ranks), clock
        self._kept: dict[tuple[str, int, int], list[Tensor]] = {}
        self.sent = self.between = self.received = 0  # bytes of the last step; received: of the last rounds
        self.payload, self.wire = 0, 0.0  # by the meter, of the last step

    @property
    def state_bytes(self) -> int:
        """Bytes of error states and momenta."""
        tables = [table for plan in self.plans for table in plan.states[plan.bucket].saved(plan.bucket).values()]
        return sum(value.nbytes for table in tables for value in table.values() if isinstance(value, Tensor))

    def step(self, gradient: Tensor) -> tuple[float, float]:
        """Seconds of encoding and of decoding."""
        self.sent = self.between = self.received = self.payload = 0
        self.wire = 0.0
        both = [self._bucket(plan, gradient) for plan in self.plans]
        return sum(encode for encode, _ in both), sum(decode for _, decode in both)

    def _bucket(self, plan: Any, gradient: Tensor) -> tuple[float, float]:
        for i, s in enumerate(plan.bucket.segments):
            plan.bucket.use_gradient(i, gradient[s.offset : s.offset + s.numel])
        conversation, seconds, replies = plan.states.reduce(plan.bucket), [], None
        received = 0
        while True:
            start = self._clock()
            try:
                requests = next_requests(conversation, replies)
            except StopIteration as stop:
                seconds.append(self._clock() - start)
                assert stop.value.nonfinite is None
                self.received += received
                return sum(seconds[:-1]), seconds[-1]
            seconds.append(self._clock() - start)
            self.between += received
            answers = [self._ranks.reply(request) for request in requests]
            parts = [self._copied((plan.bucket.name, len(seconds), i), answer) for i, answer in enumerate(answers)]
            received = sum(part.nbytes for own in parts for part in own)
            both = zip(parts, answers, strict=True)
            replies = tuple(own[0] if isinstance(answer, Tensor) else tuple(own) for own, answer in both)
            self.sent += sum(request.tensor.nbytes for request in requests)  # type: ignore[union-attr, misc]
            for request in requests:
                payload, wire, _ = bytes_of(request, self._ranks.rank, self._ranks.size)
                self.payload, self.wire = self.payload + payload, self.wire + wire

    def _copied(self, key: tuple[str, int, int], answer: Any) -> list[Tensor]:
        parts = [answer] if isinstance(answer, Tensor) else list(answer)
        kept = self._kept.setdefault(key, [torch.empty_like(part) for part in parts])
        for own, part in zip(kept, parts, strict=True):
            own.copy_(part)
        return kept


class Floors:
    """Seconds per byte: of v.add_(g), of a fill, and of a sum."""

    def __init__(self, numel: int, clock: Clock):
        even = numel + numel % 2  # to be read as int64
        self._clock = clock
        self.g, self.v = torch.zeros(even), torch.zeros(even)

    def measure(self) -> tuple[float, float, float]:
        times = [self._clock()]
        for work in (lambda: self.v.add_(self.g), self.v.zero_, self.g.view(torch.int64).sum):
            work()
            times.append(self._clock())
        update, fill, read = ((after - before) / self.g.nbytes for before, after in pairwise(times))
        return update / 3, fill, read

    def of(self, method: Method, rates: tuple[float, float, float]) -> tuple[float, float]:
        """Seconds of encoding and of decoding at these rates."""
        update, fill, read = rates
        state, gradient = method.state_bytes, self.g.nbytes
        encode = (2 * state + gradient) * update if state else gradient * read
        encode += method.sent * fill + method.between * read
        return encode, method.received * read + gradient * fill


class TopK(Stateful):
    """torch.topk of each tensor with error feedback."""

    def __init__(self, layout: Any, share: float):
        super().__init__(layout, "cpu")
        self.share = share

    def step(self, gradients: list[Tensor]) -> None:
        for g, v, sizes in zip(gradients, self.v, self.sizes, strict=True):
            v.add_(g)
            for part in v.split(sizes):
                chosen = torch.topk(part.abs(), max(1, round(self.share * part.numel())), sorted=False).indices
                part.index_fill_(0, chosen, 0.0)


def answered(tensor: Tensor, **options: Any) -> Any:
    """In place of an all-reduce: the handle of one of a single process, which completes at once."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result([tensor])
    return SimpleNamespace(get_future=lambda: future)


class GradBucket:
    """The parts of torch.distributed.GradBucket that the hooks use."""

    def __init__(self, bucket: Bucket, index: int, last: bool):
        self.flat = torch.zeros(bucket.numel)
        views = [segment.of(self.flat) for segment in bucket.segments]
        self.buffer, self.gradients = lambda: self.flat, lambda: views
        self.index, self.is_last = lambda: index, lambda: last


def power_sgd_hook(rank: int) -> Callable[[Any], Any]:
    """torch's hook with its matrices in batches, which is the faster way."""
    options: dict[str, Any] = {"start_powerSGD_iter": 2, "batch_tensors_with_same_shape": True}
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, rank, **options)
    state.iter = 2
    return partial(powerSGD_hook.powerSGD_hook, state)


def hooked(buckets: Sequence[Bucket], hook: Callable[[Any], Any], clock: Clock) -> Callable[[Tensor], float]:
    """The seconds of a step of one of torch's hooks, with equal ranks."""
    made: list[Any] = [GradBucket(b, i, i == len(buckets) - 1) for i, b in enumerate(buckets)]

    def step(g: Tensor) -> float:
        for bucket, gradient in zip(made, g.split([bucket.numel for bucket in buckets]), strict=True):
            bucket.flat.copy_(gradient)
        with patch.object(dist, "all_reduce", answered):
            start = clock()
            for bucket in made:
                hook(bucket).wait()
            return clock() - start

    return step


def peer_of(
    name: str, method: Method, tensors: Sequence[tuple[str, Tensor]], ranks: int, clock: Clock
) -> tuple[str, Callable[[Tensor], float]]:
    """The strongest known program that does the same: its name, and the seconds of its step."""
    buckets, world = [plan.bucket for plan in method.plans], dist.group.WORLD
    layout = [bucket.segments for bucket in buckets]
    assert world is not None, "torch's hooks need the process group that main() makes"
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    if name in hooks or name.startswith("powersgd-"):
        hook = partial(hooks[name], world) if name in hooks else power_sgd_hook(int(name.split("-")[1]))
        return "torch's hook", hooked(buckets, hook, clock)
    shares = {"topk": 0.01, "dgc-residual": 0.01, "sparseloco": 1 / 64}
    if name in shares or name.startswith("dgc"):
        density = 0.01 if name == "dgc-1-percent" else 0.001
        eager = TopK(layout, shares[name]) if name in shares else Eager(layout, density, 0.9, "cpu")

        def step(g: Tensor) -> float:
            start = clock()
            eager.step(list(g.split([bucket.numel for bucket in buckets])))
            return clock() - start

        return ("torch.topk" if name in shares else "the original's steps"), step

    def plain(g: Tensor) -> float:
        kernels.use("reference")
        try:
            return sum(reference.step(g))
        finally:
            kernels.use("auto")

    reference = Method(name, tensors, ranks, clock)
    return "plain PyTorch", plain


def parameters_of(model: str) -> list[tuple[str, Tensor]]:
    """Tensors with the names and shapes of a model's parameters, on the meta device."""
    if model == "resnet50":
        return [(name, p.to("meta")) for name, p in parameters_of_torchvision(model)]
    with torch.device("meta"):
        if model == "resnet18":
            return list(resnet18(num_classes=10).named_parameters())
        if model == "lstm":
            lstm = torch.nn.LSTM(650, 650, 3)
            return [("embedding", torch.empty(28869, 650)), *lstm.named_parameters(), ("bias", torch.empty(28869))]
        vocabulary = load(["configs/wmt16/base.py", "configs/wmt16/big.py"]).dataset.vocabulary_size
        return list(transformer_big(vocabulary=vocabulary).named_parameters())


def matrices(numel: int, tensors: int) -> list[tuple[str, Tensor]]:
    """Equal matrices of about `numel` elements in all. Only their shapes are used."""
    columns = 1 << (isqrt(max(1, numel // tensors)).bit_length() - 1)
    shape = max(1, numel // tensors // columns), columns
    return [(f"matrix{i}", torch.empty(shape, device="cpu")) for i in range(tensors)]


def sizes(args: Any) -> Iterator[tuple[str, list[tuple[str, Tensor]]]]:
    """The models that the options name, with a title each."""
    for model in args.models:
        yield model, [(name, torch.empty(p.shape, device="cpu")) for name, p in parameters_of(model)]
    for millions in [] if args.models else args.elements:
        for tensors in args.tensors:
            shapes = matrices(round(millions * MILLION), tensors)
            yield f"{tensors} x {list(shapes[0][1].shape)}", shapes


def measure(
    method: Method, tensors: int, peer: Callable[[Tensor], float] | None, args: Any, clock: Clock
) -> Iterator[tuple[str, dict[str, Any]]]:
    """For each instruction set its row: milliseconds, and ratios to the floors and to the peer."""
    generator = torch.Generator().manual_seed(0)
    numel, floors = method.numel, Floors(method.numel, clock)
    pool = torch.randn(numel + 64, generator=generator)

    def gradient(number: int) -> Tensor:
        return pool[number % 4 * 16 :][:numel]

    def step(isa: str, number: int) -> tuple[float, float]:
        if isa in ISAS:
            choose_isa(isa)
        return method.step(gradient(number))

    works: dict[str, Callable[[int], Any]] = {
        **{isa: partial(step, isa) for isa in args.isas},
        "floors": lambda number: floors.measure(),
    }
    if peer is not None:
        works["peer"] = lambda number: peer(gradient(number))
    found = in_turns(works, args.rounds, warm_up=3, slow=["peer"])
    rates = found["floors"]
    if args.busy:
        rates = {0: least(rates.values())}
    floor = {i: floors.of(method, each) for i, each in rates.items()}
    for isa in args.isas:
        times = {0: least(found[isa].values())} if args.busy else found[isa]
        row: dict[str, Any] = {"isa": isa, "payload_bytes": method.payload, "wire_bytes": method.wire}
        row["fewer"] = all_reduce_wire_bytes(4 * numel, args.ranks) / method.wire
        for i, what in enumerate(("encode", "decode")):
            own, under = ({number: 1e3 * both[i] for number, both in of.items()} for of in (times, floor))
            row |= {f"{what}_ms": middle(own), f"{what}_floor_ms": middle(under), what: ratio(own, under)}
        whole = {number: sum(both) for number, both in times.items()}
        row["step"] = ratio(whole, {number: sum(both) for number, both in floor.items()})
        row |= {"ns": 1e9 * middle(whole) / numel, "state_bytes": method.state_bytes / numel}
        row["us_per_tensor"] = 1e6 * middle(whole) / tensors
        if peer is not None:
            row["peer"] = ratio({0: min(found["peer"].values())} if args.busy else found["peer"], whole)
        yield isa, row


def least(found: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    """The least of each number."""
    return tuple(map(min, zip(*found, strict=True)))


def main() -> None:
    parser = options("benchmarks.methods", __doc__, threads=torch.get_num_threads(), rounds=7)
    add_methods(parser, NAMES, DEFAULT)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[], help="in place of --elements")
    parser.add_argument("--elements", type=float, nargs="+", default=[25, 100], help="millions of them")
    parser.add_argument("--tensors", type=int, nargs="+", default=[24])
    parser.add_argument("--ranks", type=int, default=4, help="2 or more")
    parser.add_argument("--peers-up-to", type=float, default=25, help="millions of elements; 0 leaves peers out")
    parser.add_argument("--isas", nargs="+", choices=ISAS, help="default: the best one, or DGC_KERNELS_ISA")
    parser.add_argument("--busy", action="store_true", help="one thread's CPU time, the least of all rounds")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks: one rank sends nothing")
    kernel, clock = kernels.of(torch.empty(0)).selection, perf_counter
    args.isas = args.isas or [getattr(kernel, "isa", kernel.name)]
    if args.busy:
        args.threads, clock = 1, thread_time
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for torch's hooks
    print(f"{kernels.describe(torch.device('cpu'))}, {args.threads} threads, {args.ranks} ranks")
    columns = [
        ("payload_bytes", "payload", "13,d"),
        ("fewer", "fewer", "8.1f"),
        ("state_bytes", "state", "7.2f"),
    ]
    for what in ("encode", "decode"):
        columns += [(f"{what}_floor_ms", "floor ms", "10.1f"), (f"{what}_ms", f"{what} ms", "11.1f")]
        columns.append((what, "ratio", "7.2f"))
    columns += [("step", "both", "7.2f"), ("ns", "ns", "8.2f"), ("us_per_tensor", "us", "10.1f")]
    result: dict[str, Any] = {"benchmark": "methods", "threads": args.threads, "ranks": args.ranks, "found": {}}
    with torch.no_grad():
        for shapes_are, shapes in sizes(args):
            numel = sum(tensor.numel() for _, tensor in shapes)
            print(f"\n{(title := f'{shapes_are}, {numel:,} elements')}", end="")
            table = Table(
                "", 17 if len(args.isas) == 1 else 26, [*columns, ("peer", "peer", "7.2f"), ("peer_is", "", "22s")]
            )
            for name in args.methods:
                method = Method(name, shapes, args.ranks, clock)
                words, peer = "", None
                if numel <= args.peers_up_to * MILLION:
                    words, peer = peer_of(name, method, shapes, args.ranks, clock)
                for isa, row in measure(method, len(shapes), peer, args, clock):
                    table.add(f"{name} {isa}", {**row, "peer_is": f"  {words}"})
            result["found"][title] = table.rows
    dist.destroy_process_group()
    print_json(result)


if __name__ == "__main__":
    main()
