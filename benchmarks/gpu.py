"""The Triton backend on a real GPU: correctness (invariants) and the cost of its steps, in one run of ten minutes.

    make gpu        or        python -m benchmarks.gpu

It needs CUDA, PyTorch and Triton, but no Horovod, no MPI and no network. --dry-run needs no GPU: everything runs
once, small, in Triton's interpreter and over Gloo. docs/gpu.md describes the invariants, the table and the
targets. The invariants run in several processes and take at most half of the time. GB/s count the minimum memory
traffic of a step (DGC 20 bytes per parameter; PowerSGD 16: the gradient and the error read, the error and the
result written), and `/ copy` compares its time with the time of a copy of as many bytes.

What fails is printed with its name, and the rest goes on. After --minutes nothing begins, and what is left is
listed. --write puts the table into docs/gpu.md, row by row. If anything failed, the exit status is 1. --launches
prints only how many kernels of this library (Triton) and operations of PyTorch a step of one bucket launches, the
bytes per parameter that DGC's kernels read and write from the gradient to the payload, and what that costs the
host with launches replaced by nothing.
"""

import os
import platform
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks._harness import options, print_json
from benchmarks._stand_ins import patch_builtin, provide_jaxtyping
from scripts.launch import usable_cores

TAKES = "10 min of a GPU, or 2 min with --dry-run"
PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"


def obstacle(dry_run: bool) -> str | None:
    """Return why this machine cannot run the command, and how to fix it."""
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            return f"{package} is not installed: {sys.executable} -m pip install {package}"
    if dry_run:
        return None
    import torch

    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU; --dry-run shows that the command works without one"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set, so nothing would run on the GPU: unset it"
    return None


def prepare(dry_run: bool) -> bool:
    """Prepare this process to import the kernels. Returns whether jaxtyping is not installed."""
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        import triton.runtime.interpreter

        triton.runtime.interpreter._patch_builtin = patch_builtin
    return provide_jaxtyping()


def run_some_laws(k: str, processes: str, seconds: str, device: str, file: str) -> None:
    """Run a process of `run_laws`."""
    prepare(device == "cpu")
    import torch

    import dgc.kernels as kernels
    from benchmarks._gpu_steps import work_on_laws

    torch.set_num_threads(1)
    kernels.use("triton")
    where = torch.device(device) if device == "cpu" else torch.device(device, 0)
    work_on_laws(int(k), int(processes), float(seconds), where, Path(file))


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
    if prepare(args.dry_run):
        print(f"jaxtyping is not installed; annotations are ignored ({sys.executable} -m pip install jaxtyping)")
    import torch
    import triton

    import dgc.kernels as kernels

    found: dict[str, Any]
    kernels.use("triton")
    device = torch.device("cpu") if args.dry_run else torch.device("cuda", torch.cuda.current_device())
    name = "none: a dry run" if args.dry_run else torch.cuda.get_device_name(device)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    print(f"GPU: {name}; " + ", ".join(f"{key} {value}" for key, value in versions.items()), flush=True)

    from benchmarks import _gpu_steps as steps

    if args.launches:
        found = {"launches": steps.print_launches(device), "bytes": steps.print_bytes()}
        found["host"] = steps.print_host_costs()
        print_json({"benchmark": "gpu", **versions, **found})
        return 0
    parts, title = steps.Parts(args.minutes), f"{name}; PyTorch {torch.__version__}, Triton {triton.__version__}"

    def keep(rows: Any) -> None:
        if args.write is not None:
            steps.write_table(args.write, title, rows)

    processes = min(steps.MOST_PROCESSES, usable_cores())
    tried = steps.run_laws("benchmarks.gpu", parts, device, 1.0 if args.laws_only else 0.5, processes)
    failed = len(parts.failed)
    found = {"laws": {"number": tried, "failed": list(parts.failed)}, "targets": {}, "rows": {}}
    print(f"laws: {tried - failed} of {tried} hold, in {processes} processes", flush=True)
    found |= {"failed": parts.failed, "not_run": parts.not_run}
    if not args.laws_only:
        table = steps.Rows(parts, device, args.rounds, keep)
        found |= {"targets": steps.measure(table, args, "benchmarks.gpu"), "rows": table.rows}
    for target, holds in found["targets"].items():
        print(f"{'reached' if holds else 'MISSED '}  {target}")
    print("".join(f"NOT RUN  {part}\n" for part in parts.not_run), end="")
    print_json({"benchmark": "gpu", "gpu": name, **versions, **found})
    return 1 if parts.failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["as-laws"]:
        run_some_laws(*sys.argv[2:])
    elif "as-a-rank" in sys.argv:
        provide_jaxtyping()
        from benchmarks._gpu_steps import work
        from benchmarks._launches import begin

        begin(work, main)
    else:
        sys.exit(main())
