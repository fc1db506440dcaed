"""Command line of `benchmarks.outer_speed`, which its __init__.py describes."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import benchmarks.outer_speed
from benchmarks.launches import on_networks, run_ranks
from benchmarks.netlab import Laboratory
from benchmarks.outer_speed.ranks import DENSE, OUTER
from benchmarks.results import print_json

NAMES = (*DENSE, *OUTER)


def measure_all(args: argparse.Namespace, ranks: int, laboratory: Laboratory | None) -> dict[str, Any]:
    keys = ("methods", "batch", "threads", "steps", "every", "delay", "launcher")
    settings = {key: getattr(args, key) for key in keys}
    result: dict[str, Any] = run_ranks("benchmarks.outer_speed.ranks", settings, ranks, laboratory, args.launcher)
    return result


def report(args: argparse.Namespace, ranks: int, found: dict[str, Any], network: dict[str, Any] | None) -> None:
    """Print a table and a line of JSON."""
    if network is not None:
        reached = f"one TCP connection reaches {network['bits_per_second'] / 1e6:.0f} Mbit/s"
        print(f"{network['hosts']} hosts, {network['rate']} each way: {reached}")
    ranks_and_batch = f"{ranks} ranks under {args.launcher}, batch {args.batch} x 64 tokens per rank"
    print(f"{found['parameters']:,} parameters, {ranks_and_batch}")
    heads = f"{'method':<16}{'steps':>7}{'tokens/s':>11}{'alone':>9}{'share %':>9}{'drift':>7}{'wire MB/step':>14}"
    print(f"\n{heads}")
    for name, row in found["methods"].items():
        speeds = f"{row['tokens_per_second']:11.1f}{row['alone_tokens_per_second']:9.1f}{100 * row['share']:9.1f}"
        print(f"{name:<16}{row['steps']:7d}{speeds}{row['drift']:7.2f}{row['wire_bytes_per_step'] / 1e6:14.3f}")
    settings = {"ranks": ranks, "batch": args.batch, "delay": args.delay, "launcher": args.launcher}
    print_json({"benchmark": "outer_speed", **settings, "network": network, **found})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.outer_speed",
        description=benchmarks.outer_speed.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--batch", type=int, default=4, help="sequences of 64 tokens per rank")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--steps", type=int, default=5, help="of a window without exchanges, and of dense methods")
    parser.add_argument("--every", type=int, help="H of all outer steps, instead of their own")
    parser.add_argument("--delay", type=int, default=5, help="of streaming, at most H divided by its 5 fragments")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="on this machine, without --hosts")
    parser.add_argument(
        "--launcher",
        choices=("mpirun", "torchrun"),
        default="mpirun",
        help="mpirun: Horovod and MPI; torchrun: torch.distributed and Gloo",
    )
    parser.add_argument("--hosts", type=int, nargs="+", help="of a laboratory: see docs/netlab.md")
    parser.add_argument("--rate", nargs="+", default=["100mbit"], help="of each host in each direction")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.set_defaults(repeats=1, together=1, warmup=0)  # a method has one window
    args = parser.parse_args(argv)
    if min(args.steps, args.batch, args.threads) < 1 or (args.every is not None and args.every < 1):
        parser.error("--steps, --batch, --threads and --every must be at least 1")
    return on_networks(
        args,
        lambda ranks, laboratory: measure_all(args, ranks, laboratory),
        lambda ranks, found, network: report(args, ranks, found, network),
    )


if __name__ == "__main__":
    sys.exit(main())
