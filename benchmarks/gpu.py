"""The Triton backend on a real GPU: correctness (laws) and the cost of its steps.

    make gpu        or        python -m benchmarks.gpu

The command needs CUDA, PyTorch and Triton, but no Horovod, no MPI and no network. --dry-run needs no GPU:
everything runs once, at a small size, in Triton's interpreter. It shows only that the command works.

1. The laws: every case of tests/kernels/test_triton*.py on device tensors, payloads and steps compared with the
   bits of the CPU, and bitwise reproducibility. If a law fails, the exit status is 1.
2. The table: milliseconds of a step, kernels launched, and the places where the host waited for the device, with
   counts. `/ copy` is the ratio to the minimum memory traffic of the step (DGC 20 bytes per parameter; PowerSGD
   16: the gradient and the error read, the error and the result written), at the rate of a copy measured in the
   same run.

--launches needs no GPU either. It prints only how many kernels of this library (Triton) and operations of PyTorch
a step of one bucket launches: until its payload, and from the payloads of 2, 8 and 64 ranks to the mean. A second
table has the bytes per parameter that DGC's kernels read and write from the gradient to the payload.

Targets: `gradient in, payload out` has no wait and takes at most 1.3 times its floor. The last line of the output
is JSON.
"""

import os
import platform
import sys
import traceback
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Table, options, print_json
from benchmarks.stand_ins import provide_jaxtyping

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu_steps import Counts

TAKES = "a few minutes of a GPU, or 1 min with --dry-run"
TARGET = 1.3
POWERSGD_BYTES = 16
RANKS = (2, 8, 64)
SMALL: list[list[tuple[int, ...]]] = [[(300, 200), (64,)], [(100, 100)]]


def obstacle(dry_run: bool) -> str | None:
    """Return why this machine cannot run the command, and how to fix it."""
    pip = f"{sys.executable} -m pip install"
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            return f"{package} is not installed: {pip} {package}"
    if dry_run:
        return None
    import torch

    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU; --dry-run shows that the command works without one"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set, so nothing would run on the GPU: unset it"
    return None


def keep_laws(device: "torch.device") -> tuple[int, list[str]]:
    """Return the number of laws, and those that fail."""
    from benchmarks.gpu_steps import laws

    number, failed = 0, []
    for name, law in laws(device):
        number += 1
        try:
            law()
        except Exception:
            failed.append(name)
            print(f"FAILED {name}\n{traceback.format_exc(limit=-3)}", flush=True)
    print(f"laws: {number - len(failed)} of {number} hold", flush=True)
    return number, failed


class Rows(Table):
    """The table, with the places where the host waits."""

    def __init__(self) -> None:
        columns = [("ms", "ms", "10.3f"), ("ratio_to_copy", "/ copy", "8.2f"), ("launches", "launches", "10d")]
        super().__init__("", 42, [*columns, ("waits", "waits", "7d")])

    def measured(self, name: str, ms: float, counts: "Counts", against_copy: float | None = None) -> None:
        row = {"ms": ms, "launches": counts.launches, "waits": sum(counts.waits.values())}
        row |= {} if against_copy is None else {"ratio_to_copy": against_copy}
        self.add(name, {**row, "driver_waits": counts.driver_waits, "where": dict(counts.waits)})
        for place, often in counts.waits.most_common():
            print(f"    {often} at {place}")


def measure(device: "torch.device", dry_run: bool, rounds: int) -> dict[str, Any]:
    import torch

    from benchmarks import step_overhead
    from benchmarks.gpu_steps import FORMATS, Codec, Training, Whole, count, milliseconds, random_gradients
    from dgc.compression import DGCCompressor, PowerSGDCompressor
    from dgc.memory import DGCSGDMemory

    if dry_run:
        buckets, step, copy_rate = SMALL, None, 1.0
    else:
        words = ["--device", "cuda", "--rounds", str(rounds)]
        ours, gradients, step = step_overhead.report(step_overhead.arguments().parse_args(words))
        copy_rate = step["copy_gb_per_s"]
        layout = step_overhead.plan_buckets(step_overhead.resnet50())
        buckets = [[segment.shape for segment in bucket] for bucket in layout]
    numel = sum(torch.Size(shape).numel() for shapes in buckets for shape in shapes)

    table = Rows()
    if step is not None:
        counts = count(lambda: ours.step(gradients.next()), device)
        table.measured("DGC: gradient in, payload out", step["ours_ms"], counts, step["ratio_to_copy"])
    fresh = random_gradients(buckets, 0, device)
    methods = [
        (Whole("DGC: gradient in, mean out", DGCCompressor(0.001, DGCSGDMemory(0.9)), buckets, device), 20),
        (Whole("PowerSGD, rank 1", PowerSGDCompressor(1), buckets, device), POWERSGD_BYTES),
        (Whole("PowerSGD, rank 4", PowerSGDCompressor(4), buckets, device), POWERSGD_BYTES),
    ]
    for method, traffic in methods:
        ms = milliseconds(lambda: method.step(fresh), device, rounds)  # noqa: B023 (called here)
        counts = count(lambda: method.step(fresh), device)  # noqa: B023
        table.measured(method.name, ms, counts, ms * copy_rate * 1e6 / (traffic * numel))
    for name, form in FORMATS.items():
        codec = Codec(form, 10_000 if dry_run else 6_500_000, 0.001, device, ranks=4)
        for what, work in (("encode", codec.encode), ("decode of 4", codec.decode), ("merge of 4", codec.merge)):
            table.measured(f"{what}: {name}", milliseconds(work, device, rounds), count(work, device))
    training = Training(32 if dry_run else 1024, device)
    ms = milliseconds(training.step, device, rounds)
    table.measured(f"training step, {training.buckets} buckets", ms, count(training.step, device))
    return {"step": step, "rows": table.rows}


def print_launches(device: "torch.device") -> dict[str, Any]:
    from benchmarks.gpu_steps import COUNTED, launches_of

    columns = [("encode", "encode", "9d"), ("encode_torch", "PyTorch", "9d")]
    for ranks in RANKS:
        columns += [(f"{ranks}", f"mean of {ranks}", "12d"), (f"{ranks}_torch", "PyTorch", "9d")]
    table = Table("", 24, columns)
    for name, make in COUNTED.items():
        both = {ranks: launches_of(make, ranks, device) for ranks in RANKS}
        encoding, _ = both[RANKS[0]]
        row = {"encode": encoding.kernels, "encode_torch": encoding.operations}
        row |= {f"{ranks}": own.kernels for ranks, (_, own) in both.items()}
        row |= {f"{ranks}_torch": own.operations for ranks, (_, own) in both.items()}
        table.add(name, row)
    return table.rows


def print_bytes() -> dict[str, Any]:
    from benchmarks import step_overhead
    from benchmarks.gpu_steps import FORMATS, bytes_of_dgc

    columns = [
        ("parameters", "parameters", "13,d"),
        ("bytes", "bytes each", "12.2f"),
        ("ratio", "/ minimum", "11.3f"),
    ]
    table = Table("DGC, 0.1 %", 24, columns)
    for name, tensors in (("ResNet-50", step_overhead.resnet50()), ("GPT-2 medium", step_overhead.gpt2_medium())):
        layout = step_overhead.plan_buckets(tensors)
        numel = sum(t.numel() for t in tensors.values())
        moved = bytes_of_dgc(layout, FORMATS["fp16 values, int32 indices"])
        each = {kernel: round(n / numel, 3) for kernel, n in moved.most_common()}
        total = sum(moved.values()) / numel
        ratio = total / step_overhead.FLOOR_BYTES
        table.add(name, {"bytes": total, "ratio": ratio, "parameters": numel, "kernels": each})
        print("    " + ", ".join(f"{kernel} {n}" for kernel, n in each.items()))
    return table.rows


def targets(found: dict[str, Any]) -> dict[str, bool]:
    if found["step"] is None:
        return {}
    row = found["rows"]["DGC: gradient in, payload out"]
    return {
        "waits nowhere": row["waits"] == 0,
        f"at most {TARGET} times the floor": found["step"]["ratio_to_floor"] <= TARGET,
        f"at most {TARGET} times a copy's rate": row["ratio_to_copy"] <= TARGET,
    }


def main(words: Iterable[str] | None = None) -> int:
    parser = options("benchmarks.gpu", __doc__)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, in Triton's interpreter")
    parser.add_argument("--rounds", type=int, default=36)
    parser.add_argument("--laws-only", action="store_true")
    parser.add_argument("--launches", action="store_true", help="on the CPU: only launches and bytes")
    args = parser.parse_args(None if words is None else list(words))
    args.dry_run |= args.launches
    reason = obstacle(args.dry_run)
    if reason is not None:
        print(f"make gpu: {reason}", file=sys.stderr)
        return 2
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    if provide_jaxtyping():
        print(f"jaxtyping is not installed; annotations are ignored ({sys.executable} -m pip install jaxtyping)")
    import torch
    import triton

    import dgc.kernels as kernels

    kernels.use("triton")
    device = torch.device("cpu") if args.dry_run else torch.device("cuda", torch.cuda.current_device())
    name = "none: a dry run" if args.dry_run else torch.cuda.get_device_name(device)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    print(f"GPU: {name}; " + ", ".join(f"{key} {value}" for key, value in versions.items()), flush=True)

    if args.launches:
        print_json({"benchmark": "gpu", **versions, "launches": print_launches(device), "bytes": print_bytes()})
        return 0
    number, failed = keep_laws(device)
    found: dict[str, Any] = {"step": None, "rows": {}}
    if not args.laws_only:
        found = measure(device, args.dry_run, 1 if args.dry_run else args.rounds)
    reached = targets(found)
    for target, holds in reached.items():
        print(f"{'reached' if holds else 'MISSED '}  {target}")
    laws = {"number": number, "failed": failed}
    print_json({"benchmark": "gpu", "gpu": name, **versions, "laws": laws, "targets": reached, **found})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
