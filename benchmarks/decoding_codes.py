"""Time to encode and to decode methods that send a code for every element, compared with the least memory traffic.

    python -m benchmarks.decoding_codes [--methods 2bit onebit] [--ranks 1 4 8 64] [--threads 1] [--clock cpu]

The tensors are those of ResNet-50, fp32, in buckets of 25 MB. One rank's conversation runs without a transport.
The replies to its requests are copies of its own payloads, one buffer per rank, made outside the measured time.
The cost does not depend on the codes.

encode    from gradient and error to the first request's payload and the new error
decode    from the replies to the mean in the bucket; with two rounds, also the encoding between them
floors    encode: a sum of two fp32 buffers into a third. decode: a fill of all buckets with zeros, and a sum of
          all words of the payloads

Methods and floors alternate within each round, in random order. A ratio is the median over rounds of the ratio to
the floor of the same round. Checks of the payloads are included, and the check of the mean for infinities. On
a machine that others use, `--clock cpu` counts the CPU seconds of all threads. The output is a table and a
last line of JSON. Its top-level numbers are the largest ratios: of decoding with 4 ranks, over the methods that
gather, and of encoding.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

import dgc.kernels as kernels
from benchmarks.results import print_json
from benchmarks.step_overhead import plan_buckets, resnet50_shapes
from dgc.bucket import Bucket
from dgc.comm.requests import AllGather, AllToAll, next_requests
from dgc.compression import (
    NaturalCompressor,
    OneBitCompressor,
    QSGDCompressor,
    ScaledSignCompressor,
    SignSGDCompressor,
    ThresholdCompressor,
)
from dgc.compression.error_feedback import ErrorFeedbackCompressor
from dgc.engine.state import BucketStates

METHODS: dict[str, Callable[[], ErrorFeedbackCompressor]] = {
    "2bit": lambda: ThresholdCompressor(2, 1.0, wire="gather"),
    "1bit": lambda: ThresholdCompressor(1, 0.0, wire="gather"),
    "scaled sign": ScaledSignCompressor,
    "onebit": OneBitCompressor,
    "signsgd": SignSGDCompressor,
    "qsgd 4 bits": lambda: QSGDCompressor(4),
    "natural": NaturalCompressor,
    "2bit scatter": lambda: ThresholdCompressor(2, 1.0, wire="scatter"),
    "1bit scatter": lambda: ThresholdCompressor(1, 0.0, wire="scatter"),
}
RANKS = (1, 4, 8, 64)
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
NAMED = 4  # the number of ranks of the top-level ratio
SCATTER = "scatter"


class Model:
    """Buckets, and a gradient for each, outside of the bucket's buffer as after a backward pass."""

    def __init__(self) -> None:
        segments = plan_buckets(resnet50_shapes())
        cpu = torch.device("cpu")
        self.buckets = [Bucket(f"bucket{i}", s, torch.float32, cpu) for i, s in enumerate(segments)]
        generator = torch.Generator().manual_seed(0)
        self._gradients = [torch.randn(bucket.numel, generator=generator) for bucket in self.buckets]

    @property
    def numel(self) -> int:
        return sum(bucket.numel for bucket in self.buckets)

    def fill(self, bucket: Bucket) -> None:
        gradient = self._gradients[self.buckets.index(bucket)]
        for i, s in enumerate(bucket.segments):
            bucket.use_gradient(i, gradient[s.offset : s.offset + s.numel])


class Replies:
    """Replies to the requests of one rank, in buffers that are made once."""

    def __init__(self, ranks: int):
        self._ranks = ranks
        self._kept: dict[tuple[str, int, int], tuple[Tensor, ...]] = {}
        self.nbytes = 0

    def to(self, bucket: Bucket, round_: int, requests: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(self._reply((bucket.name, round_, i), request) for i, request in enumerate(requests))

    def _reply(self, key: tuple[str, int, int], request: Any) -> tuple[Tensor, ...]:
        if key not in self._kept:
            if isinstance(request, AllGather):
                own = request.tensor
            else:
                assert isinstance(request, AllToAll), request
                own = request.tensor[: request.splits[0]]
            self._kept[key] = tuple(own.clone() for _ in range(self._ranks))
            self.nbytes += self._ranks * own.numel() * own.element_size()
        return self._kept[key]

    def read(self) -> None:
        """Read all payloads once."""
        for parts in self._kept.values():
            for part in parts:
                whole = part.view(torch.uint8)
                whole[: whole.numel() // 8 * 8].view(torch.int64).sum()


@dataclass
class Exchange:
    """The steps of one method."""

    model: Model
    states: BucketStates
    replies: Replies
    clock: Callable[[], float]

    def step(self) -> tuple[float, float]:
        """Return seconds of encoding and of decoding."""
        encoding = decoding = 0.0
        for bucket in self.model.buckets:
            self.model.fill(bucket)
            start = self.clock()
            conversation = self.states.reduce(bucket)
            requests = next_requests(conversation)
            encoding += self.clock() - start
            for round_ in range(9):
                replies = self.replies.to(bucket, round_, requests)
                start = self.clock()
                try:
                    requests = next_requests(conversation, replies)
                except StopIteration:
                    break
                finally:
                    decoding += self.clock() - start
        return encoding, decoding


@dataclass
class Floors:
    """The memory that encoding and decoding must move."""

    model: Model
    replies: Replies
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._three = [torch.ones(3, bucket.numel) for bucket in self.model.buckets]

    def step(self) -> tuple[float, float]:
        start = self.clock()
        for g, e, kept in self._three:
            torch.add(g, e, out=kept)
        encoding = self.clock() - start
        start = self.clock()
        for bucket in self.model.buckets:
            bucket.flat.zero_()
        self.replies.read()
        return encoding, self.clock() - start


def row_of(model: Model, name: str, ranks: int, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Return medians in milliseconds, and ratios to the floors."""
    states, replies = BucketStates(METHODS[name]()), Replies(ranks)
    for bucket in model.buckets:
        states.add(bucket, ranks, 0)
    exchange, floors = Exchange(model, states, replies, clock), Floors(model, replies, clock)
    times: dict[str, list[tuple[float, float]]] = {"method": [], "floor": []}
    steps = {"method": exchange.step, "floor": floors.step}
    for number in range(-2, rounds):
        for who in random.Random(number).sample(list(steps), len(steps)):
            taken = steps[who]()
            if number >= 0:
                times[who].append(taken)
    row: dict[str, Any] = {}
    for i, what in enumerate(("encode", "decode")):
        row[f"{what}_ms"] = median(own[i] for own in times["method"]) * 1e3
        row[f"{what}_floor_ms"] = median(own[i] for own in times["floor"]) * 1e3
        row[what] = median(own[i] / floor[i] for own, floor in zip(times["method"], times["floor"], strict=True))
    row["payload_bytes"] = replies.nbytes
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, backend = Model(), kernels.describe(torch.device("cpu"))
    print(f"resnet50: {model.numel:,} elements in {len(model.buckets)} buckets")
    print(f"{backend}, {args.threads} threads; {args.clock} times in ms, ratios to the floor")
    print(f"\n{'method':<13}{'ranks':>6}{'MB':>8}{'floor ms':>10}{'decode ms':>11}{'ratio':>7}", end="")
    print(f"{'floor ms':>10}{'encode ms':>11}{'ratio':>7}")
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name in args.methods:
        for ranks in args.ranks:
            row = found.setdefault(name, {})[ranks] = row_of(model, name, ranks, args.rounds, CLOCKS[args.clock])
            text = f"{name:<13}{ranks:6}{row['payload_bytes'] / 1e6:8.1f}"
            for what in ("decode", "encode"):
                text += f"{row[f'{what}_floor_ms']:10.1f}{row[f'{what}_ms']:11.1f}{row[what]:7.2f}"
            print(text, flush=True)
    gathering = [rows[NAMED]["decode"] for name, rows in found.items() if NAMED in rows and SCATTER not in name]
    summary = {
        "decode_ratio_to_floor_at_4": max(gathering, default=None),
        "encode_ratio_to_floor": max(row["encode"] for rows in found.values() for row in rows.values()),
        "threads": args.threads,
        "clock": args.clock,
    }
    print_json({"benchmark": "decoding_codes", **summary, "methods": found})


if __name__ == "__main__":
    main()
