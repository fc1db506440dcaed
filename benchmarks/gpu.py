"""The Triton backend on a real GPU: correctness (laws) and the cost of its steps, in one run of ten minutes.

    make gpu        or        python -m benchmarks.gpu

It needs CUDA, PyTorch and Triton, but no Horovod, no MPI and no network. --dry-run needs no GPU: everything runs
once, small, in Triton's interpreter and over Gloo. docs/gpu.md describes laws, table and targets.

The laws take at most half of the time. GB/s are those of the minimum memory traffic of a step (DGC 20 bytes per
parameter; PowerSGD 16: the gradient and the error read, the error and the result written), and `/ copy` compares
its time with that of a copy of as many bytes. Training steps through DDP, with PyTorch's hooks and ours, run over
NCCL on one GPU or two. In --stress steps of DGC, two ranks check all payloads and compare their means: over NCCL
on two GPUs, through host memory on one.

What fails is printed with its name, and the rest goes on. After --minutes nothing begins, and what is left is
listed. --write puts the table into docs/gpu.md. The last line is JSON. If anything failed, the exit status is 1.

--launches needs no GPU either. It prints only how many kernels of this library (Triton) and operations of PyTorch
a step of one bucket launches: until its payload, and from the payloads of 2, 8 and 64 ranks to the mean. A second
table has the bytes per parameter that DGC's kernels read and write from the gradient to the payload.
"""

import argparse
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Table, options, print_json
from benchmarks.stand_ins import provide_jaxtyping

if TYPE_CHECKING:
    import torch

TAKES = "10 min of a GPU, or 2 min with --dry-run"
PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
BEGIN, END = "<!-- the table of make gpu -->", "<!-- its end -->"
DGC_STEP, TARGET, LAUNCHES = "DGC: gradient in, payload out", 1.3, 8
DGC_BYTES, POWERSGD_BYTES = 20, 16  # per parameter
RANKS = (2, 8, 64)
SMALL: list[list[tuple[int, ...]]] = [[(100, 100), (64,)], [(50, 60)]]
NCCL = "cpu:gloo,cuda:nccl"
HEADS = ("ms", "GB/s", "/ copy", "launches", "waits", "peak MB")
COLUMNS = [
    (head, head, form) for head, form in zip(HEADS, ("10.3f", "8.0f", "8.2f", "10d", "7d", "9.0f"), strict=True)
]


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


class Parts:
    """Runs the parts of the benchmark until `minutes` are over. What fails is printed, and the rest goes on.

    `failed` and `not_run` have the names of parts.
    """

    def __init__(self, minutes: float):
        self._end, self._seconds = time.monotonic() + 60 * minutes, 60 * minutes
        self.failed: list[str] = []
        self.not_run: list[str] = []

    def left(self, share: float = 1.0) -> float:
        """The seconds until a share of the time is over."""
        return self._end - time.monotonic() - (1 - share) * self._seconds

    def run(self, name: str, part: Callable[[], object], share: float = 1.0) -> None:
        """Run a part, unless this share of the time is over."""
        if self.left(share) <= 0:
            self.not_run.append(name)
            return
        try:
            part()
        except (Exception, SystemExit):  # SystemExit: a rank has failed
            self.fail(name, traceback.format_exc(limit=-3))

    def fail(self, name: str, reason: str) -> None:
        self.failed.append(name)
        print(f"FAILED {name}\n{reason}", flush=True)


class Rows(Table):
    """The table. Each row is a part of its own. `copy_rate` is that of a copy in GB/s, once it is measured."""

    def __init__(self, parts: Parts, device: "torch.device", rounds: int) -> None:
        super().__init__("", 42, COLUMNS)
        self.parts, self.device, self.rounds, self.copy_rate = parts, device, rounds, math.nan

    def measure(self, name: str, make: Callable[[], Callable[[], object]], traffic: float = 0) -> None:
        """Add the row of a step. make: returns the step. traffic: least bytes that it moves in memory."""
        from benchmarks.gpu_steps import milliseconds, peak_memory

        def part() -> None:
            with peak_memory(self.device) as peak:
                step = make()
                ms = milliseconds(step, self.device, self.rounds, self.rounds // 9)
            self.measured(name, ms, step, traffic, peak)

        self.parts.run(name, part)

    def measured(
        self, name: str, ms: float, step: Callable[[], object], traffic: float, more: Mapping[str, float] = {}
    ) -> None:
        """Add a row, and print the places where the host waits in this step. more: of the row."""
        from benchmarks.gpu_steps import count

        counts, rate = count(step, self.device), traffic / ms / 1e6
        row = {"ms": ms, "launches": counts.launches, "waits": sum(counts.waits.values()), **more}
        row |= {"GB/s": rate, "/ copy": self.copy_rate / rate} if traffic else {}
        self.add(name, {**row, "driver_waits": counts.driver_waits, "where": dict(counts.waits)})
        for place, often in counts.waits.most_common():
            print(f"    {often} at {place}")


def measure_dgc(table: Rows, buckets: list[Any], warm_up: int) -> dict[str, bool]:
    """Add DGC's step until its payload, and what it is compared with. Return which targets are reached."""
    from benchmarks import step_overhead
    from benchmarks.harness import middle, ratio
    from benchmarks.step_methods import Copy, Ours, Pass, Step, TopK
    from dgc.selection import Predicted
    from dgc.wire import CastValues, PlainIndices, SparseFormat

    device, momentum = table.device.type, step_overhead.MOMENTUM
    gradients = step_overhead.Gradients(buckets, device)
    numel = sum(map(sum, gradients.sizes))
    form = SparseFormat(CastValues("fp16"), PlainIndices("int32"))
    ours = Ours("triton", Predicted(), buckets, 0.001, momentum, form, device)
    for _ in range(warm_up):
        ours.step(gradients.next())
    ours.settle()
    others: list[Step] = [
        Copy(numel, device),
        Pass("triton", buckets, momentum, device),
        TopK(buckets, 0.001, device),
    ]
    for other in others:
        other.start_from(ours.u, ours.v)
    times = step_overhead.measure([ours, *others], gradients, table.rounds, device)
    copy, floor = (times[other.name] for other in others[:2])
    table.copy_rate = Copy.bytes_per_parameter * numel / middle(copy) / 1e6
    for step in (*others, ours):
        name, traffic = (DGC_STEP, DGC_BYTES) if step is ours else (step.name, step.bytes_per_parameter)
        table.measured(name, middle(times[step.name]), partial(step.step, gradients.next()), traffic * numel)

    def select() -> None:
        for i, gradient in enumerate(gradients.next()):
            ours.select(i, gradient)

    table.measure("DGC: accumulate and select", lambda: select, DGC_BYTES * numel)
    row = table.rows[DGC_STEP]
    return {
        f"{DGC_STEP}: waits nowhere": row["waits"] == 0,
        f"{DGC_STEP}: at most {LAUNCHES} launches per bucket": 0 < row["launches"] <= LAUNCHES * len(buckets),
        f"{DGC_STEP}: at most {TARGET} times the floor": ratio(times[ours.name], floor) <= TARGET,
        f"{DGC_STEP}: at most {TARGET} times a copy's time": row["/ copy"] <= TARGET,
    }


def measure(table: Rows, args: argparse.Namespace) -> dict[str, bool]:
    """Add all rows. Return which targets are reached."""
    import torch

    from benchmarks import step_overhead
    from benchmarks.gpu_steps import FORMATS, Codec, Training, Whole, random_gradients
    from dgc.bucket import lay_out
    from dgc.compression import DGCCompressor, PowerSGDCompressor
    from dgc.memory import DGCSGDMemory

    device, reached = table.device, {}
    buckets = step_overhead.plan_buckets(step_overhead.resnet50())
    if args.dry_run:
        buckets = [lay_out([(f"{s}", torch.empty(s, device="meta")) for s in shapes]) for shapes in SMALL]
    table.parts.run(DGC_STEP, lambda: reached.update(measure_dgc(table, buckets, 2 if args.dry_run else 100)))
    shapes = [[segment.shape for segment in bucket] for bucket in buckets]
    numel, fresh = sum(s.numel for bucket in buckets for s in bucket), random_gradients(shapes, 0, device)
    methods = {
        "DGC: gradient in, mean out": (lambda: DGCCompressor(0.001, DGCSGDMemory(0.9)), DGC_BYTES),
        "PowerSGD, rank 1": (lambda: PowerSGDCompressor(1), POWERSGD_BYTES),
        "PowerSGD, rank 4": (lambda: PowerSGDCompressor(4), POWERSGD_BYTES),
    }
    for name, (make, traffic) in methods.items():
        whole = lambda make=make: partial(Whole("", make(), shapes, device).step, fresh)  # noqa: E731
        table.measure(name, whole, traffic * numel)
    for name, form in FORMATS.items():
        codec = cache(partial(Codec, form, 10_000 if args.dry_run else 6_500_000, 0.001, device, ranks=4))
        for what in ("encode", "decode of 4", "merge of 4"):
            table.measure(f"{what}: {name}", lambda codec=codec, what=what: getattr(codec(), what.split()[0]))  # type: ignore[misc]
    table.measure("training step, 4 layers", lambda: Training(32 if args.dry_run else 1024, device).step)

    # ranks that share a GPU cannot use NCCL
    nccl = [] if args.dry_run else [(NCCL, min(2, torch.cuda.device_count()))]
    for backend, ranks in nccl if (NCCL, 2) in nccl else [*nccl, ("gloo", 2)]:
        name = f"{ranks} ranks, {backend.split(':')[-1]}"
        table.parts.run(name, partial(measure_ranks, table, name, backend, ranks, args))
    return {} if args.dry_run else reached


def measure_ranks(table: Rows, prefix: str, backend: str, ranks: int, args: argparse.Namespace) -> None:
    from benchmarks.launches import run_ranks

    settings = {"backend": backend, "stress": args.stress, "seconds": table.parts.left(), "rounds": table.rounds}
    settings |= {"device": table.device.type, "ddp": args.dry_run or backend == NCCL}
    for name, row in run_ranks("benchmarks.gpu", settings, ranks, launcher="torchrun").items():
        if row is None:
            table.parts.not_run.append(f"{prefix}: {name}")
        elif "error" in row:
            table.parts.fail(f"{prefix}: {name}", row["error"])
        else:
            table.add(f"{prefix}: {name}", row)


def write_table(page: Path, title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Put the table between the markers of a page. Raises ValueError if it has none."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} has no {BEGIN} before {END}")
    lines = [f"| step | {' | '.join(HEADS)} |", f"|---|{'---:|' * len(COLUMNS)}"]
    for name, row in rows.items():
        cells = (f"{row[key]:{form}}".strip() if key in row else "" for key, _, form in COLUMNS)
        lines.append(f"| {name.replace('|', '')} | {' | '.join(cells)} |")
    page.write_text("\n".join([f"{before}{begin}", f"{title}:", "", *lines, f"{end}{after}"]))


def print_launches(device: "torch.device") -> dict[str, Any]:
    from benchmarks.gpu_steps import COUNTED, launches_of

    columns = [("encode", "encode", "9d"), ("encode_torch", "PyTorch", "9d")]
    for ranks in RANKS:
        columns += [(f"{ranks}", f"mean of {ranks}", "12d"), (f"{ranks}_torch", "PyTorch", "9d")]
    table = Table("", 24, columns)
    for name, make in COUNTED.items():
        both = {ranks: launches_of(make, ranks, device) for ranks in RANKS}
        counted = {"encode": both[RANKS[0]][0], **{f"{ranks}": decoding for ranks, (_, decoding) in both.items()}}
        row = {what: own.kernels for what, own in counted.items()}
        table.add(name, row | {f"{what}_torch": own.operations for what, own in counted.items()})
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
        ratio = total / DGC_BYTES
        table.add(name, {"bytes": total, "ratio": ratio, "parameters": numel, "kernels": each})
        print("    " + ", ".join(f"{kernel} {n}" for kernel, n in each.items()))
    return table.rows


def main(words: Iterable[str] | None = None) -> int:
    parser = options("benchmarks.gpu", __doc__)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, in Triton's interpreter")
    parser.add_argument("--minutes", type=float, default=10, help="what has not begun then is not run")
    parser.add_argument("--rounds", type=int, help="of each time; default 36, or 1 with --dry-run")
    parser.add_argument("--stress", type=int, help="steps of the exchange with checksums; default 10000, or 3")
    help_of_write = "put the table into this page; default: docs/gpu.md"
    parser.add_argument("--write", type=Path, nargs="?", const=PAGE, metavar="FILE", help=help_of_write)
    parser.add_argument("--laws-only", action="store_true")
    parser.add_argument("--launches", action="store_true", help="on the CPU: only launches and bytes")
    args = parser.parse_args(None if words is None else list(words))
    args.dry_run |= args.launches
    if args.dry_run and args.write == PAGE:
        parser.error("--dry-run measures nothing: --write needs another FILE than docs/gpu.md")
    args.rounds = args.rounds or (1 if args.dry_run else 36)
    args.stress = args.stress or (3 if args.dry_run else 10_000)
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
    from benchmarks.gpu_steps import laws

    parts, tried = Parts(args.minutes), 0
    for law, body in laws(device):
        parts.run(law, body, 1.0 if args.laws_only else 0.5)
        tried += 1
    found: dict[str, Any] = {"number": tried - len(parts.not_run), "failed": list(parts.failed)}
    print(f"laws: {found['number'] - len(parts.failed)} of {found['number']} hold", flush=True)
    found = {"laws": found, "targets": {}, "rows": {}, "failed": parts.failed, "not_run": parts.not_run}
    if not args.laws_only:
        table = Rows(parts, device, args.rounds)
        found |= {"targets": measure(table, args), "rows": table.rows}
    for target, holds in found["targets"].items():
        print(f"{'reached' if holds else 'MISSED '}  {target}")
    print("".join(f"NOT RUN  {part}\n" for part in parts.not_run), end="")
    if args.write is not None:
        write_table(args.write, f"{name}; PyTorch {torch.__version__}, Triton {triton.__version__}", found["rows"])
    print_json({"benchmark": "gpu", "gpu": name, **versions, **found})
    return 1 if parts.failed else 0


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """What each rank does. A row is None if it was not run."""
    import torch

    import dgc.kernels as kernels
    from benchmarks.ddp_step import whole_steps
    from benchmarks.gpu_steps import milliseconds, peak_memory, stress
    from dgc.comm import all_reduce, broadcast_object
    from dgc.comm.staging import StagedTransport
    from dgc.comm.torch_distributed import TorchTransport

    kernels.use("triton")
    device, end = torch.device(settings["device"]), time.monotonic() + settings["seconds"]
    on_gpu, backend, rounds = device.type == "cuda", settings["backend"], settings["rounds"]
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    # a rank that waits for another one gives up after a minute; Triton's interpreter takes longer
    transport: Any = TorchTransport(timeout=60.0 if on_gpu else None, backend=backend)
    transport = StagedTransport(transport) if on_gpu and backend != NCCL else transport
    rows: dict[str, Any] = {}

    def is_over() -> bool:
        return bool(broadcast_object(transport, time.monotonic() > end))

    def add(name: str, measured: Callable[[], float]) -> None:
        rows[name] = None
        if not is_over():
            try:
                with peak_memory(device) as peak:
                    ms = all_reduce(transport, torch.tensor(measured(), dtype=torch.float64), "max").item()
                rows[name] = {"ms": ms, **peak}
            except Exception:
                rows[name] = {"error": traceback.format_exc(limit=-3)}

    if settings["ddp"]:
        for name, make in whole_steps(device, 4096 if on_gpu else 16, transport).items():
            add(name, lambda make=make: milliseconds(make(), device, rounds))  # type: ignore[misc]
    if transport.size > 1:
        steps, scale = settings["stress"], 10 if on_gpu else 1
        add(f"DGC, {steps} steps with checks", lambda: stress(transport, device, steps, scale, is_over))
    return rows


if __name__ == "__main__":
    if "as-a-rank" in sys.argv:
        provide_jaxtyping()
        from benchmarks.launches import begin

        begin(work, main)
    else:
        sys.exit(main())
