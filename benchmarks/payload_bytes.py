"""Payload of a step of DGC on ResNet-50, for every format of values and indices, and every treatment of vectors.

    python -m benchmarks.payload_bytes [--ratio 0.001] [--ranks 1] [--values sign] [--indices rice]

Matrices are sent as `values` and `indices`. Vectors are sent whole as fp32, fp16, bf16 or int8, or sparse like
matrices, at 1 %. Each combination takes one step on a random gradient of torchvision's ResNet-50, in buckets of
25 MB. The meter counts what a rank contributes, with headers, slack and padding. Sizes are planned: every step at
this ratio has the same. Ranks are simulated in one process. The output is a table and a last line of JSON.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import dgc_datasets.torchvision_compat  # noqa: F401  (before torchvision)
from benchmarks.results import print_json
from benchmarks.wire import INDICES, VALUES
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DGCCompressor, Route, Rule
from dgc.engine.buckets import keep_states, plan_buckets
from dgc.memory import DGCSGDMemory
from dgc.wire import IndexFormat, ValueFormat

VECTORS: dict[str, dict[str, Any]] = {
    **{name: {"dense_values": name} for name in ("fp32", "fp16", "bf16", "int8")},
    "sparse": {"vectors": "sparse", "vector_ratio": 0.01},
}


def resnet50() -> list[tuple[str, Tensor]]:
    """Return the parameters by name, with random gradients."""
    from torchvision import models

    with torch.device("meta"):
        named = list(models.resnet50().named_parameters())
    generator = torch.Generator().manual_seed(0)
    parameters = [(name, torch.empty(p.shape)) for name, p in named]
    for _, p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    return parameters


def payload(
    parameters: Sequence[tuple[str, Tensor]],
    values: ValueFormat,
    indices: IndexFormat,
    vectors: str,
    ratio: float = 0.001,
    ranks: int = 1,
) -> int:
    """Return the bytes that a rank contributes in one step with these gradients, and with a value of VECTORS."""
    planned = []
    for rank in range(ranks):
        memory = DGCSGDMemory(momentum=0.9)
        compressor = DGCCompressor(ratio, memory, values=values, indices=indices, **VECTORS[vectors])
        planned.append(plan_buckets(parameters, Route([Rule(compressor)]).compressor_for, 25.0, "bucket"))
        keep_states(planned[-1], ranks, rank)
    world = LockstepWorld(ranks)
    for plans in zip(*planned, strict=True):
        for plan in plans:
            for i in range(len(plan.parameters)):
                plan.collect(i)
        world.converse(plans[0].bucket.name, [plan.states.reduce(plan.bucket) for plan in plans])
    return world.meters[0].payload_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=0.001)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--values", nargs="+", choices=VALUES, default=list(VALUES))
    parser.add_argument("--indices", nargs="+", choices=INDICES, default=list(INDICES))
    args = parser.parse_args()
    parameters = resnet50()
    numel = sum(p.numel() for _, p in parameters)
    vectors = sum(p.numel() for _, p in parameters if p.dim() < 2)
    print(f"resnet50: {numel:,} parameters, {vectors:,} of them in vectors; ratio {args.ratio:g}")
    print(f"\n{'values':<8}{'indices':<8}" + "".join(f"{name:>12}" for name in VECTORS))
    rows: dict[str, dict[str, int]] = {}
    for values in args.values:
        for indices in args.indices:
            with torch.no_grad():
                sizes = {
                    name: payload(parameters, VALUES[values], INDICES[indices], name, args.ratio, args.ranks)
                    for name in VECTORS
                }
            rows[f"{values} {indices}"] = sizes
            print(f"{values:<8}{indices:<8}" + "".join(f"{size:12,}" for size in sizes.values()), flush=True)
    print_json(
        {
            "benchmark": "payload_bytes",
            "ratio": args.ratio,
            "ranks": args.ranks,
            "dense_fp32": 4 * numel,
            "smallest": min(size for sizes in rows.values() for size in sizes.values()),
            "payload_bytes": rows,
        }
    )


if __name__ == "__main__":
    main()
