"""Bits per element of every payload format compared with the entropy, and encoding and decoding rates.

    python -m benchmarks.wire [--model resnet18] [--steps 30] [--densities 0.001 0.01 0.1]

For each density a model is trained on scikit-learn's digits, on one rank with DGC steps: momentum correction,
accumulation, exact selection of the largest elements of every tensor, masking. Images are doubled in size;
otherwise the last kernels of a ResNet would see one pixel and have a gradient only in their centre. The selections
of the last steps are encoded. All sizes are planned sizes, with header, slack and all rounding, per element that
was sent:

    index     header and indices
    element   the whole payload
    bound     H(D) / D bits, the minimum average size of the indices of random supports of density D
    sent      share of the planned elements that was sent; elements that do not fit stay in the residual

Rates are in million elements per second and thread. They are those of whole payloads and, in the rows without
values, of the index codes only. The output has tables and a last line of JSON. Its top-level numbers are those of
sign and rice at the first density.
"""

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import dgc_models
from benchmarks.recordings import Learner, endless
from benchmarks.results import print_json
from dgc.kernels import Budget, SparseVector
from dgc.kernels.codec import HEADER_BYTES, Codec
from dgc.kernels.native import NativeCodec
from dgc.wire import (
    CastValues,
    Int8Values,
    PackedIndices,
    PlainIndices,
    RiceIndices,
    SignValues,
    SparseFormat,
    TwoBitValues,
)
from dgc.wire.indices import IndexFormat
from dgc.wire.payload import PayloadPlan
from dgc.wire.values import ValueFormat
from dgc_datasets import Digits

MODELS = ("resnet18", "resnet110")
INDICES: dict[str, IndexFormat] = {
    "int64": PlainIndices(),
    "int32": PlainIndices("int32"),
    "packed": PackedIndices(),
    "rice": RiceIndices(),
}
VALUES: dict[str, ValueFormat] = {
    "fp32": CastValues(),
    "fp16": CastValues("fp16"),
    "bf16": CastValues("bf16"),
    "int8": Int8Values(),
    "2 bits": TwoBitValues(4.0),
    "sign": SignValues(),
}
LR, BATCH = 0.025, 32
RECORDED = 5  # last steps that are recorded

# A bucket's budget, number of elements, and selections of the recorded steps.
Recording = tuple[Budget, int, list[SparseVector]]


def record(name: str, density: float, steps: int) -> list[Recording]:
    torch.manual_seed(0)
    model: nn.Module = getattr(dgc_models, name)(in_channels=1)
    batches = endless(Digits()["train"], BATCH)
    larger = ((nn.functional.interpolate(images, scale_factor=2.0), labels) for images, labels in batches)
    learner = Learner(model, larger, density, LR)
    recordings: list[Recording] = [
        (plan.per_tensor, bucket.numel, []) for plan, bucket in zip(learner.plans, learner.buckets, strict=True)
    ]
    for step in range(steps):
        learner.differentiate()
        for recording, selection in zip(recordings, learner.update(), strict=True):
            if step >= steps - RECORDED:
                recording[2].append(selection)
    return recordings


def seconds(work: Callable[[], Any], repeats: int) -> float:
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def rates(form: SparseFormat, codec: Codec, recordings: list[Recording], repeats: int) -> dict[str, float]:
    """Return rates for the last recorded selections, in million elements per second."""
    inputs = [(selections[-1], budget, numel) for budget, numel, selections in recordings]
    firsts = [torch.tensor(numel) for _, _, numel in inputs]
    native = NativeCodec()
    plans = [PayloadPlan(form, budget, numel) for _, budget, numel in inputs]
    made = [plan.encode(native, given[0], first) for plan, given, first in zip(plans, inputs, firsts, strict=True)]
    total = sum(int(given[0].count) for given in inputs) / 1e6

    def encode() -> None:
        for plan, given, first in zip(plans, inputs, firsts, strict=True):
            plan.encode(codec, given[0], first)

    def decode() -> None:
        for done, plan in zip(made, plans, strict=True):
            plan.decode(codec, [done.payload]).wait()

    return {"encode": total / seconds(encode, repeats), "decode": total / seconds(decode, repeats)}


def index_rates(indices: IndexFormat, codec: Codec, recordings: list[Recording], repeats: int) -> dict[str, float]:
    """Same as `rates`, for the indices of the largest bucket only."""
    budget, numel, selections = max(recordings, key=lambda recording: recording[1])
    plan, selection = indices.plan(budget.capacity, numel), selections[-1]
    section = torch.zeros(plan.nbytes, dtype=torch.uint8)
    sent = codec.indices_encode_(selection, plan, section)
    encode = seconds(lambda: codec.indices_encode_(selection, plan, section.zero_()), repeats)
    decode = seconds(lambda: codec.indices_decode(section, sent.count, plan), repeats)
    total = int(selection.count) / 1e6
    return {"encode": total / encode, "decode": total / decode}


def sizes(form: SparseFormat, codec: Codec, recordings: list[Recording]) -> dict[str, float]:
    planned = index = sent = capacity = 0
    for budget, numel, selections in recordings:
        for selection in selections:
            done = PayloadPlan(form, budget, numel).encode(codec, selection, torch.tensor(numel))
            planned += 8 * done.payload.numel()
            index += 8 * (HEADER_BYTES + form.indices.plan(budget.capacity, numel).nbytes)
            sent += int(done.sent.count)
            capacity += budget.capacity
    return {"bits_per_index": index / sent, "bits_per_element": planned / sent, "sent": sent / capacity}


def bound(recordings: list[Recording]) -> float:
    """Return H(D) / D over all buckets."""
    bits = 0.0
    for budget, numel, _ in recordings:
        density = budget.capacity / numel
        bits -= budget.capacity * math.log2(density) + (numel - budget.capacity) * math.log2(1 - density)
    return bits / sum(budget.capacity for budget, _, _ in recordings)


def measure(name: str, density: float, steps: int, codecs: dict[str, Codec]) -> dict[str, Any]:
    recordings = record(name, density, steps)
    numel, least = sum(r[1] for r in recordings), bound(recordings)
    planned = sum(r[0].capacity for r in recordings)
    print(
        f"\nD = {density:.1%}: {planned:,} of {numel:,} elements in {len(recordings)} buckets, bound {least:.3f}"
    )
    print(f"{'':<13}{'index':>8}{'element':>9}{'sent':>8}", *(f"{name:>10} enc    dec" for name in codecs))
    rows: dict[str, Any] = {}
    for index_name, indices in INDICES.items():
        for value_name, values in VALUES.items():
            form = SparseFormat(values, indices)
            row: dict[str, Any] = sizes(form, codecs["native"], recordings)
            for codec_name, codec in codecs.items():
                row[codec_name] = rates(form, codec, recordings, 3 if codec_name == "native" else 1)
            rows[f"{value_name} {index_name}"] = row
            bits = f"{row['bits_per_index']:8.3f}{row['bits_per_element']:9.3f}{row['sent']:8.2%}"
            print(f"{value_name + ' ' + index_name:<13}{bits}", *(_shown(row[name]) for name in codecs))
    for index_name in ("packed", "rice"):
        speeds = {
            name: index_rates(INDICES[index_name], codec, recordings, 7 if name == "native" else 1)
            for name, codec in codecs.items()
        }
        rows[index_name] = speeds
        print(f"{index_name:<38}", *(_shown(speeds[name]) for name in codecs))
    return {"bound": least, "planned": planned, "numel": numel, "encodings": rows}


def _shown(rate: dict[str, float]) -> str:
    return f"{rate['encode']:14.1f}{rate['decode']:7.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=MODELS, default="resnet18")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--densities", type=float, nargs="+", default=[0.001, 0.01, 0.1])
    args = parser.parse_args()
    codecs: dict[str, Codec] = {"native": NativeCodec(), "reference": Codec()}
    print(f"{args.model}, {args.steps} steps with batches of {BATCH}")
    found = {f"{d:g}": measure(args.model, d, args.steps, codecs) for d in args.densities}
    first = found[f"{args.densities[0]:g}"]
    best = first["encodings"]["sign rice"]
    outer = {"bits_per_index": best["bits_per_index"], "bits_per_element": best["bits_per_element"]}
    print_json({**outer, "bound": first["bound"], "densities": found})


if __name__ == "__main__":
    main()
