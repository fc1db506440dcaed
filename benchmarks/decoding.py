"""Time to decode and merge the payloads of N ranks after an all-gather, compared with the memory moved at least.

    python -m benchmarks.decoding [--ranks 1 2 4 8 16 32 64 128 256] [--threads 2]

The tensors are ResNet-50's with two or more dimensions, fp32, in buckets of 25 MB. Every rank selects the
largest elements of each tensor of its own random gradient (heavy tails: normal times log-normal) and encodes them.
All ranks are recorded in one process. Their supports are independent, so their union is as large as it can be.

dense     payloads to the dense gradient in the bucket, as methods without momentum correction need it
sparse    payloads to the mean as ascending indices and values, which DGCSGD subtracts from the parameters
single    the dense gradient without the joint call: one payload after the other, `merge_mean`, `write_to`
floor     a fill of all buckets with zeros, and a sum of all words of the payloads
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dgc.kernels as kernels
from benchmarks._harness import Table, in_turns, middle, options, print_json, ratio
from benchmarks.step_overhead import Gradients, plan_buckets, resnet50
from dgc.core.bucket import Bucket, Segment
from dgc.core.results import SparseResult
from dgc.kernels import SparseVector
from dgc.kernels.payload.native import NativeMeanDecoder
from dgc.sparse.compressor import INDICES, VALUES
from dgc.sparse.payloads import SparseFormat
from dgc.sparse.payloads.payload import PayloadPlan
from dgc.sparse.selectors import quota_of

TAKES = "5 min"
FORMATS = ("fp32 int32", "fp16 packed", "sign rice", "int8 rice", "2bit rice")
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECODER = NativeMeanDecoder()
RATIOS = ("dense", "sparse", "single")


def format_of(name: str) -> SparseFormat:
    values, indices = name.split()
    return SparseFormat(VALUES[values](), INDICES[indices]())


class Recording:
    """The selections of `ranks` ranks in every bucket."""

    def __init__(self, buckets: Sequence[tuple[Segment, ...]], ratio: float, ranks: int):
        self.buckets = [Bucket(f"bucket{i}", b, torch.float32, torch.device("cpu")) for i, b in enumerate(buckets)]
        self.quotas = [quota_of(bucket.segments, ratio) for bucket in self.buckets]
        gradients = Gradients(list(buckets), "cpu")
        self.selections: list[list[SparseVector]] = []
        for _ in range(ranks):
            chosen = zip(gradients.next(), self.quotas, strict=True)
            self.selections.append([kernels.of(g).selection.select(g, p.per_tensor).elements for g, p in chosen])

    @property
    def numel(self) -> int:
        return sum(bucket.numel for bucket in self.buckets)

    def payloads(self, form: SparseFormat) -> list[Tensor]:
        """Return a row of bytes per rank, by bucket."""
        gathered = []
        for i, (bucket, quota) in enumerate(zip(self.buckets, self.quotas, strict=True)):
            codec, end = kernels.of(bucket.flat).codec, torch.tensor(bucket.numel)
            payload = PayloadPlan(form, quota.per_tensor, bucket.numel)
            gathered.append(torch.stack([payload.encode(codec, s[i], end).payload for s in self.selections]))
        return gathered


class Decoding(NamedTuple):
    """The work of one rank that has received the payloads of `ranks` ranks."""

    recording: Recording
    form: SparseFormat
    gathered: list[Tensor]
    ranks: int

    def dense(self) -> None:
        for i, bucket in enumerate(self.recording.buckets):
            finite, _ = self._plan(i).mean_into_(bucket.flat, DECODER, self._rows(i), self.ranks).wait()
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
        budget, numel = self.recording.quotas[i].per_tensor, self.recording.buckets[i].numel
        return PayloadPlan(self.form, budget, numel, what=f"bucket{i}")


def row_of(decoding: Decoding, rounds: int) -> dict[str, Any]:
    """Return medians in milliseconds, ratios to the floor, bytes of the payloads and the share of the union."""

    def once(work: Callable[[], object], number: int) -> float:
        start = perf_counter()
        work()
        return 1e3 * (perf_counter() - start)

    methods = (decoding.dense, decoding.sparse, decoding.single, decoding.floor)
    times = in_turns({method.__name__: partial(once, method) for method in methods}, rounds)
    row: dict[str, Any] = {f"{name}_ms": middle(own) for name, own in times.items()}
    row |= {name: ratio(times[name], times["floor"]) for name in RATIOS}
    row["payload_bytes"] = sum(rows[: decoding.ranks].numel() for rows in decoding.gathered)
    row["union"] = sum(r.indices.numel() for r in decoding.sparse()) / decoding.recording.numel
    return row


def main() -> None:
    parser = options("benchmarks.decoding", __doc__, ratio=0.001, threads=torch.get_num_threads(), rounds=21)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--formats", nargs="+", default=FORMATS, help="values and indices: 'sign rice'")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recording, where = Recording(plan_buckets(resnet50()), args.ratio, max(args.ranks)), torch.device("cpu")
    print(f"{recording.numel:,} elements, {kernels.describe(where)}, {args.threads} threads")
    print("times in ms, ratios to the floor", end="")
    columns = [("ranks", "ranks", "6d"), ("megabytes", "MB", "8.2f")]
    columns += [("union", "union", "7.1%"), ("floor_ms", "floor ms", "10.2f")]
    for name in RATIOS:
        columns += [(f"{name}_ms", f"{name} ms", "11.2f"), (name, "ratio", "7.2f")]
    table = Table("", 13, columns)
    found: dict[str, dict[str, Any]] = {}
    for name in args.formats:
        gathered = recording.payloads(format_of(name))
        for ranks in args.ranks:
            row = row_of(Decoding(recording, format_of(name), gathered, ranks), args.rounds)
            table.add(name, {**row, "ranks": ranks, "megabytes": row["payload_bytes"] / 1e6})
            found.setdefault(name, {})[str(ranks)] = row
    print_json({"benchmark": "decoding", "threads": args.threads, "found": found})


if __name__ == "__main__":
    main()
