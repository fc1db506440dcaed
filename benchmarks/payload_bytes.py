"""Payload of a step of DGC on ResNet-50, for every format of values and indices, and every treatment of vectors.

    python -m benchmarks.payload_bytes [--ratio 0.001] [--values sign] [--indices rice]

Matrices are sent as `values` and `indices`. Vectors are sent whole as fp32, fp16, bf16 or int8, or sparse like
matrices, at 1 %. Each combination takes one step on a random gradient of torchvision's ResNet-50, in buckets of 25
MB. The meter counts what a rank contributes, with headers, slack and padding. Sizes are planned: every step at
this ratio has the same. Ranks are simulated in one process.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks._harness import Table, options, print_json
from benchmarks.exchange import parameters_of
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import Route, Rule
from dgc.engine.buckets import keep_states, plan_buckets
from dgc.sparse.compressor import INDICES, VALUES
from scripts.methods import build

TAKES = "1 min"
VECTORS: dict[str, dict[str, Any]] = {
    **{name: {"dense_values": name} for name in ("fp32", "fp16", "bf16", "int8")},
    "sparse": {"vectors": "sparse", "vector_ratio": 0.01},
}


def resnet50() -> list[tuple[str, Tensor]]:
    """Return the parameters by name, with random gradients."""
    generator = torch.Generator().manual_seed(0)
    parameters = parameters_of("resnet50")
    for _, p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    return [(name, p) for name, p in parameters]


def payload(
    parameters: Sequence[tuple[str, Tensor]], values: str, indices: str, vectors: str, ratio: float = 0.001
) -> int:
    """Return the bytes that a rank contributes in one step with these gradients, and with a value of VECTORS."""
    compressor = build("dgc-fp32-int64", ratio, values=values, indices=indices, **VECTORS[vectors])
    planned = plan_buckets(parameters, Route([Rule(compressor)]).compressor_for, 25.0, "bucket")
    world = LockstepWorld(1)
    keep_states(planned, 1, 0)
    for plan in planned:
        for i in range(len(plan.parameters)):
            plan.collect(i)
        world.converse(plan.bucket.name, [plan.states.reduce(plan.bucket)])
    return world.meters[0].payload_bytes


def main() -> None:
    parser = options("benchmarks.payload_bytes", __doc__, ratio=0.001)
    parser.add_argument("--values", nargs="+", choices=VALUES, default=VALUES)
    parser.add_argument("--indices", nargs="+", choices=INDICES, default=INDICES)
    args = parser.parse_args()
    parameters = resnet50()
    numel = sum(p.numel() for _, p in parameters)
    of_vectors = sum(p.numel() for _, p in parameters if p.dim() < 2)
    print(f"resnet50: {numel:,} parameters, {of_vectors:,} of them in vectors; ratio {args.ratio:g}")
    table = Table("values, indices", 16, [(name, name, "12,d") for name in VECTORS])
    for values in args.values:
        for indices in args.indices:
            with torch.no_grad():
                found = {name: payload(parameters, values, indices, name, args.ratio) for name in VECTORS}
            table.add(f"{values} {indices}", found)
    smallest = min(size for sizes in table.rows.values() for size in sizes.values())
    settings = {"ratio": args.ratio, "dense_fp32": 4 * numel, "smallest": smallest}
    print_json({"benchmark": "payload_bytes", **settings, "payload_bytes": table.rows})


if __name__ == "__main__":
    main()
