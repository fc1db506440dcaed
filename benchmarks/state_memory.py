"""Memory of DGC's state, compared with momentum SGD on the same model.

    python -m benchmarks.state_memory

Each method trains a few steps in a separate process. `live` is the bytes of all tensors alive after the last step
(parameters, gradients, buckets, optimizer and residual). `peak` is the largest resident set of the process, less
the one before the model was built, so it includes temporary memory of a step.
"""

import gc
import resource
from typing import Any

import torch

from benchmarks.harness import Table, options, print_json
from benchmarks.launches import begin, connected, run_ranks
from dgc.optim import DGCSGD, DistributedOptimizer
from scripts.methods import build

TAKES = "10 s"
WIDTH, LAYERS, STEPS = 1024, 24, 4


def live_bytes() -> int:
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def work(given: dict[str, Any]) -> dict[str, float]:
    """What the process of a method does."""
    transport = connected("mpirun")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    settings: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
    optimizer: Any = torch.optim.SGD(model.parameters(), **settings)
    if given["method"] == "dgc":
        inner, named = DGCSGD(model.parameters(), **settings), model.named_parameters()
        optimizer = DistributedOptimizer(inner, named, build("dgc-fp32-int64"), transport=transport)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
    gc.collect()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    compressed = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    return {"live": live_bytes(), "peak": peak * 1024, "compressed": compressed}


def main() -> None:
    options("benchmarks.state_memory", __doc__).parse_args()
    print(f"{LAYERS} layers of {WIDTH} x {WIDTH}", end="")
    table = Table("method", 7, [("live_mb", "live MB", "9.1f"), ("peak_mb", "peak MB", "9.1f")])
    for method in ("sgd", "dgc"):
        row = run_ranks("benchmarks.state_memory", {"method": method}, 1)
        table.add(method, {**row, "live_mb": row["live"] / 1e6, "peak_mb": row["peak"] / 1e6})
    extra = table.rows["dgc"]["live"] - table.rows["sgd"]["live"]
    floats = extra / 4 / table.rows["sgd"]["compressed"]
    print(f"DGC keeps {extra / 1e6:.1f} MB more: {floats:.3f} floats per compressed parameter")
    found = {"extra_floats_per_parameter": floats, "extra_bytes": extra}
    print_json({"benchmark": "state_memory", **found, **table.rows})


if __name__ == "__main__":
    begin(work, main)
