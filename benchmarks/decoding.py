"""Time to decode and merge the payloads of N ranks after an all-gather, compared with the memory moved at least.

    python -m benchmarks.decoding [--ratio 0.001] [--ranks 1 2 4 8 16 32 64 128 256] [--threads 2]

The tensors are those of ResNet-50 with two or more dimensions, fp32, in buckets of 25 MB. Every rank selects the
largest elements of each tensor of its own random gradient (heavy tails: normal times log-normal) and encodes them.
All ranks are recorded in one process. Their supports are independent, so their union is as large as it can be.

dense     payloads to the dense gradient in the bucket, as methods without momentum correction need it
sparse    payloads to the mean as ascending indices and values, which DGCSGD subtracts from the parameters
single    the dense gradient without the joint call: one payload after the other, `merge_mean`, `write_to`
floor     a fill of all buckets with zeros, and a sum of all words of the payloads

The methods alternate within each round, in random order. A ratio is the median over rounds of the ratio to the
floor of the same round. Tensors of one dimension are not in these payloads: an all-reduce sums them. Checks of the
payloads are included, and the check of the dense mean for infinities, which the joint call makes. The output is
a table and a last line of JSON. Its top-level number is the largest ratio of `dense` over all formats at 64 ranks.
"""

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

import dgc.kernels as kernels
from benchmarks.results import print_json
from benchmarks.step_overhead import Gradients, plan_buckets, resnet50_shapes
from benchmarks.wire import INDICES, VALUES
from dgc.bucket import Bucket, Segment
from dgc.compression.protocol import SparseResult
from dgc.kernels import SparseVector
from dgc.kernels.native import NativeMeanDecoder
from dgc.selection import plan_selection
from dgc.wire import SparseFormat
from dgc.wire.payload import PayloadPlan

FORMATS = ("fp32 int32", "fp16 packed", "sign rice", "int8 rice", "2 bits rice")
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECODER = NativeMeanDecoder()
NAMED = 64  # the number of ranks of the top-level ratio
RATIOS = ("dense", "sparse", "single")


def format_of(name: str) -> SparseFormat:
    values, indices = name.rsplit(" ", 1)
    return SparseFormat(VALUES[values], INDICES[indices])


class Recording:
    """The selections of `ranks` ranks in every bucket."""

    def __init__(self, buckets: Sequence[tuple[Segment, ...]], ratio: float, ranks: int):
        self.buckets = [Bucket(f"bucket{i}", b, torch.float32, torch.device("cpu")) for i, b in enumerate(buckets)]
        self.plans = [plan_selection(bucket.segments, ratio) for bucket in self.buckets]
        gradients = Gradients(list(buckets), "cpu")
        self.selections: list[list[SparseVector]] = []
        for _ in range(ranks):
            chosen = zip(gradients.next(), self.plans, strict=True)
            self.selections.append([kernels.of(g).selection.select(g, p.per_tensor).elements for g, p in chosen])

    @property
    def numel(self) -> int:
        return sum(bucket.numel for bucket in self.buckets)

    def payloads(self, form: SparseFormat) -> list[Tensor]:
        """Return a row of bytes per rank, by bucket."""
        gathered = []
        for i, (bucket, plan) in enumerate(zip(self.buckets, self.plans, strict=True)):
            codec, end = kernels.of(bucket.flat).codec, torch.tensor(bucket.numel)
            payload = PayloadPlan(form, plan.per_tensor, bucket.numel)
            gathered.append(torch.stack([payload.encode(codec, s[i], end).payload for s in self.selections]))
        return gathered


@dataclass
class Decoding:
    """The work of one rank that has received the payloads of `ranks` ranks."""

    recording: Recording
    form: SparseFormat
    gathered: list[Tensor]
    ranks: int

    def dense(self) -> None:
        for i, bucket in enumerate(self.recording.buckets):
            finite, _ = self._plan(i).mean_into_(bucket.flat, DECODER, self._rows(i), self.ranks)
            assert finite

    def sparse(self) -> list[SparseResult]:
        """The mean of each bucket."""
        found = [self._plan(i).mean(DECODER, self._rows(i), self.ranks) for i in range(len(self.gathered))]
        return [SparseResult(*merged.valid()) for merged, _ in found]

    def single(self) -> None:
        for i, bucket in enumerate(self.recording.buckets):
            backend = kernels.of(bucket.flat)
            parts, _ = self._plan(i).decode(backend.codec, self._rows(i)).wait()
            merged = backend.selection.merge_mean(parts, self.ranks, bucket.numel)
            SparseResult(*merged.valid()).write_to(bucket)

    def floor(self) -> None:
        for bucket, rows in zip(self.recording.buckets, self.gathered, strict=True):
            bucket.flat.zero_()
            rows[: self.ranks].view(torch.int64).sum()

    def _rows(self, i: int) -> Sequence[Tensor]:
        return self.gathered[i][: self.ranks].unbind()

    def _plan(self, i: int) -> PayloadPlan:
        budget, numel = self.recording.plans[i].per_tensor, self.recording.buckets[i].numel
        return PayloadPlan(self.form, budget, numel, what=f"bucket{i}")


def measure(methods: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return milliseconds of each method by round, after two more rounds that are not kept."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(-2, rounds):
        for name in random.Random(number).sample(list(methods), len(methods)):
            start = time.perf_counter()
            methods[name]()
            if number >= 0:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def row_of(decoding: Decoding, rounds: int) -> dict[str, Any]:
    """Return medians in milliseconds, ratios to the floor, bytes of the payloads and the share of the union."""
    methods = (decoding.dense, decoding.sparse, decoding.single, decoding.floor)
    work: dict[str, Callable[[], object]] = {method.__name__: method for method in methods}
    times = measure(work, rounds)
    row: dict[str, Any] = {f"{name}_ms": median(own) for name, own in times.items()}
    for name in RATIOS:
        row[name] = median(own / floor for own, floor in zip(times[name], times["floor"], strict=True))
    row["payload_bytes"] = sum(rows[: decoding.ranks].numel() for rows in decoding.gathered)
    row["union"] = sum(r.indices.numel() for r in decoding.sparse()) / decoding.recording.numel
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ratio", type=float, default=0.001)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--formats", nargs="+", default=FORMATS, help="values and indices: 'sign rice'")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recording = Recording(plan_buckets(resnet50_shapes()), args.ratio, max(args.ranks))
    backend = kernels.describe(torch.device("cpu"))
    print(f"resnet50: {recording.numel:,} elements in {len(recording.buckets)} buckets, ratio {args.ratio:g}")
    print(f"{backend}, {args.threads} threads; times in ms, ratios to the floor")
    print(f"\n{'format':<13}{'ranks':>6}{'MB':>7}{'union':>7}{'floor ms':>10}", end="")
    print("".join(f"{name + ' ms':>11}{'':>6}" for name in RATIOS))
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name in args.formats:
        form, rows = format_of(name), found.setdefault(name, {})
        gathered = recording.payloads(form)
        for ranks in args.ranks:
            row = rows[ranks] = row_of(Decoding(recording, form, gathered, ranks), args.rounds)
            size = f"{name:<13}{ranks:6}{row['payload_bytes'] / 1e6:7.2f}{row['union']:7.1%}"
            times = "".join(f"{row[f'{key}_ms']:11.2f}{row[key]:6.2f}" for key in RATIOS)
            print(f"{size}{row['floor_ms']:10.2f}{times}", flush=True)
    at_named = [rows[NAMED]["dense"] for rows in found.values() if NAMED in rows]
    summary = {"ratio_to_floor_at_64": max(at_named, default=None), "threads": args.threads, "ratio": args.ratio}
    print_json({"benchmark": "decoding", **summary, "formats": found})


if __name__ == "__main__":
    main()
