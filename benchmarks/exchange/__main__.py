"""Command line of `benchmarks.exchange`, which its __init__.py describes."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import benchmarks.exchange
from benchmarks.exchange.methods import HOROVOD, MODELS, NAMES
from benchmarks.launches import add_options, on_networks, portions, run_ranks
from benchmarks.netlab import Laboratory
from benchmarks.results import print_json
from benchmarks.step_times import add_network, print_table


def measure_all(args: argparse.Namespace, ranks: int, laboratory: Laboratory | None) -> dict[str, Any]:
    """The rows of all methods, in their order on the command line."""
    keys = ("model", "ratio", "warmup", "repeats", "gradient_sets")
    settings = {key: getattr(args, key) for key in keys}
    result: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for names in portions(args.methods, args.together, HOROVOD):
        print(f"... {ranks} ranks: {', '.join(names)}", file=sys.stderr, flush=True)
        result = run_ranks("benchmarks.exchange.ranks", {**settings, "methods": names}, ranks, laboratory)
        rows |= result["methods"]
    return {**result, "methods": {name: rows[name] for name in args.methods}}


def report(args: argparse.Namespace, ranks: int, found: dict[str, Any], network: dict[str, Any] | None) -> None:
    """Print a table and a line of JSON."""
    print(
        f"{args.model}: {found['parameters']:,} parameters, {ranks} ranks, {found['threads']} threads each, ratio "
        f"{args.ratio}, {args.repeats} repeats, kernels {found['kernels']}"
    )
    rows = found["methods"]
    if network is not None:
        add_network(rows, network, "exchange_ms", lambda name: "noop", ("fp16", "horovod-fp16"))
    print_table(rows, network, ("exchange_ms", "step_ms"))
    settings = {"model": args.model, "ratio": args.ratio, "ranks": ranks, "network": network}
    print_json({"benchmark": "exchange", **settings, "methods": rows})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exchange",
        description=benchmarks.exchange.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--ratio", type=float, default=0.001)
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=["noop", "dense", "fp16", "dgc"])
    parser.add_argument("--gradient-sets", type=int, default=3, help="different gradients that steps take in turn")
    add_options(parser)
    args = parser.parse_args(argv)
    if args.gradient_sets < 1:
        parser.error("--gradient-sets must be at least 1")
    return on_networks(
        args,
        lambda ranks, laboratory: measure_all(args, ranks, laboratory),
        lambda ranks, found, network: report(args, ranks, found, network),
    )


if __name__ == "__main__":
    sys.exit(main())
