"""Bits per element of every payload format, compared with the entropy of random indices.

    python -m benchmarks.wire [--steps 30] [--densities 0.001 0.01 0.1]

For each density ResNet-18 is trained by DGC on scikit-learn's digits, on one rank, with images of twice the size:
otherwise the last kernels would see one pixel. The selections of the last steps are encoded. All sizes are planned
sizes, with header, slack and all rounding, per element that was sent:

    index     header and indices
    element   the whole payload
    bound     H(D) / D bits, the minimum average size of the indices of random supports of density D

The top-level numbers of the JSON belong to sign and rice at the first density.
"""

import math
from typing import Any

import torch
from torch import nn

from benchmarks._harness import Table, options, print_json
from benchmarks._recordings import Learner, endless
from dgc.kernels import Budget, SparseVector
from dgc.kernels.payload import HEADER_BYTES
from dgc.kernels.payload.native import NativeCodec
from dgc.sparse.compressor import INDICES, VALUES
from dgc.sparse.payloads import SparseFormat
from dgc.sparse.payloads.payload import PayloadPlan
from dgc_datasets import Digits
from dgc_models import resnet18

TAKES = "2 min"
LR, BATCH = 0.025, 32
RECORDED = 5  # last steps that are recorded

# A bucket's budget, number of elements, and selections of the recorded steps.
Recording = tuple[Budget, int, list[SparseVector]]


def record(density: float, steps: int) -> list[Recording]:
    torch.manual_seed(0)
    batches = endless(Digits()["train"], BATCH)
    larger = ((nn.functional.interpolate(images, scale_factor=2.0), labels) for images, labels in batches)
    learner = Learner(resnet18(in_channels=1), larger, density, LR)
    recordings: list[Recording] = [
        (quota.per_tensor, bucket.numel, []) for quota, bucket in zip(learner.quotas, learner.buckets, strict=True)
    ]
    for step in range(steps):
        learner.differentiate()
        for recording, selection in zip(recordings, learner.update(), strict=True):
            if step >= steps - RECORDED:
                recording[2].append(selection)
    return recordings


def sizes(form: SparseFormat, recordings: list[Recording]) -> dict[str, float]:
    planned = index = sent = 0
    for budget, numel, selections in recordings:
        for selection in selections:
            done = PayloadPlan(form, budget, numel).encode(NativeCodec(), selection, torch.tensor(numel))
            planned += 8 * done.payload.numel()
            index += 8 * (HEADER_BYTES + form.indices.plan(budget.capacity, numel).nbytes)
            sent += int(done.sent.count)
    return {"bits_per_index": index / sent, "bits_per_element": planned / sent}


def bound(recordings: list[Recording]) -> float:
    """Return H(D) / D over all buckets."""
    bits = 0.0
    for budget, numel, _ in recordings:
        density = budget.capacity / numel
        bits -= budget.capacity * math.log2(density) + (numel - budget.capacity) * math.log2(1 - density)
    return bits / sum(budget.capacity for budget, _, _ in recordings)


def measure(density: float, steps: int) -> dict[str, Any]:
    recordings = record(density, steps)
    numel, least, count = sum(r[1] for r in recordings), bound(recordings), len(recordings)
    planned = sum(r[0].capacity for r in recordings)
    print(f"\nD = {density:.1%}: {planned:,} of {numel:,} elements in {count} buckets, bound {least:.3f}", end="")
    table = Table("", 13, [("bits_per_index", "index", "8.3f"), ("bits_per_element", "element", "9.3f")])
    for indices in INDICES:
        for values in VALUES:
            table.add(f"{values} {indices}", sizes(SparseFormat(VALUES[values](), INDICES[indices]()), recordings))
    return {"bound": least, "planned": planned, "numel": numel, "encodings": table.rows}


def main() -> None:
    parser = options("benchmarks.wire", __doc__, steps=30)
    parser.add_argument("--densities", type=float, nargs="+", default=[0.001, 0.01, 0.1])
    args = parser.parse_args()
    print(f"resnet18, {args.steps} steps with batches of {BATCH}")
    found = {f"{d:g}": measure(d, args.steps) for d in args.densities}
    first = found[f"{args.densities[0]:g}"]
    best = first["encodings"]["sign rice"]  # its two numbers
    print_json({"benchmark": "wire", **best, "bound": first["bound"], "densities": found})


if __name__ == "__main__":
    main()
