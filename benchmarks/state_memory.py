"""Memory of DGC's state, compared with momentum SGD on the same model.

    python -m benchmarks.state_memory

Each method trains a few steps in a separate process. `live` is the bytes of all tensors alive after the last step
(parameters, gradients, buckets, optimizer and residual). `peak` is the largest resident set of the process,
less the one before the model was built, so it includes temporary memory of a step. The output is a table and a
last line of JSON.
"""

import argparse
import gc
import json
import resource
import subprocess
import sys
from typing import Any

import torch

from benchmarks.results import print_json
from dgc.comm.horovod import HorovodTransport
from dgc.compression import DGCCompressor
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer

WIDTH, LAYERS, STEPS = 1024, 24, 4


def live_bytes() -> int:
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def measure(method: str, bucket_mb: float) -> dict[str, float]:
    transport = HorovodTransport()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    settings: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
    optimizer: torch.optim.Optimizer
    if method == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), **settings)
    else:
        optimizer = DistributedOptimizer(
            DGCSGD(model.parameters(), **settings),
            model.named_parameters(),
            DGCCompressor(0.001, DGCSGDMemory(0.9)),
            bucket_mb=bucket_mb,
            transport=transport,
        )
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
    gc.collect()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    compressed = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    return {"live": live_bytes(), "peak": peak * 1024, "compressed": compressed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--method", choices=["sgd", "dgc"], help="measure one in this process and print its JSON")
    args = parser.parse_args()
    if args.method:
        print_json(measure(args.method, args.bucket_mb))
        return
    found = {}
    for method in ("sgd", "dgc"):
        words = ["-m", "benchmarks.state_memory", "--method", method, "--bucket-mb", str(args.bucket_mb)]
        output = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True).stdout
        found[method] = json.loads(output.splitlines()[-1])
    extra = found["dgc"]["live"] - found["sgd"]["live"]
    floats = extra / 4 / found["sgd"]["compressed"]
    print(f"{LAYERS} layers of {WIDTH} x {WIDTH}: {found['sgd']['compressed']:,} compressed parameters")
    for method, row in found.items():
        print(f"{method:<4} live {row['live'] / 1e6:8.1f} MB   peak {row['peak'] / 1e6:8.1f} MB")
    print(f"DGC keeps {extra / 1e6:.1f} MB more: {floats:.3f} floats per compressed parameter")
    print_json({"extra_floats_per_parameter": floats, "extra_bytes": extra, **found})


if __name__ == "__main__":
    main()
