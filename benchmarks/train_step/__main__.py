"""Command line of `benchmarks.train_step`, which its __init__.py describes."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import benchmarks.train_step
from benchmarks.exchange.methods import HOROVOD
from benchmarks.launches import add_options, on_networks, portions, run_ranks
from benchmarks.netlab import Laboratory
from benchmarks.results import print_json
from benchmarks.step_times import add_network, print_table
from benchmarks.train_step.methods import NAMES, OPPONENTS, OVER_DDP
from benchmarks.train_step.models import MODELS, OF_TOKENS

SHOWN = ["noop", "horovod", "horovod-fp16", "fp16", "dgc", "dgc-fp16-packed", "dgc-sign-rice", "powersgd", "2bit"]
SHOWN += ["sign", "sgp", "ddp-noop", "ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd"]
SHOWN += ["dgc-fp16-packed@ddp", "dgc-sign-rice@ddp", "powersgd@ddp"]


def measure_all(args: argparse.Namespace, ranks: int, laboratory: Laboratory | None) -> dict[str, Any]:
    """The rows of all methods, in their order on the command line."""
    keys = ("model", "ratio", "warmup", "repeats", "batch", "image", "threads")
    settings = {key: getattr(args, key) for key in keys}
    ddp = [name for name in args.methods if name in OVER_DDP]
    others = [name for name in args.methods if name not in OVER_DDP]
    launches = [("mpirun", names) for names in portions(others, args.together, HOROVOD)]
    launches += [("torchrun", names) for names in portions(ddp, args.together)]
    result: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for launcher, names in launches:
        print(f"... {launcher}, {ranks} ranks: {', '.join(names)}", file=sys.stderr, flush=True)
        given = {**settings, "methods": names}
        result = run_ranks("benchmarks.train_step.ranks", given, ranks, laboratory, launcher)
        rows |= result["methods"]
    return {**result, "methods": {name: rows[name] for name in args.methods}}


def report(args: argparse.Namespace, ranks: int, found: dict[str, Any], network: dict[str, Any] | None) -> None:
    """Print a table and a line of JSON."""
    size = "" if args.model in OF_TOKENS else f" of {args.image} pixels"
    print(
        f"{args.model}: {found['parameters']:,} parameters, {ranks} ranks, {args.threads} threads each, batch "
        f"{args.batch}{size} per rank, ratio {args.ratio}, {args.repeats} repeats"
    )
    rows = found["methods"]
    if network is not None:
        # DDP sends the model's buffers in every step. Horovod's thread sends all the time.
        idle = {name: "ddp-noop" if name in OVER_DDP else "noop" for name in rows}
        add_network(rows, network, "step_ms", idle.__getitem__, OPPONENTS, per_step=("ddp-noop",))
    print_table(rows, network, ("step_ms",))
    settings = {"model": args.model, "ratio": args.ratio, "ranks": ranks, "batch": args.batch, "network": network}
    print_json({"benchmark": "train_step", **settings, "methods": rows})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_step",
        description=benchmarks.train_step.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--batch", type=int, default=4, help="of a rank: images, or sequences of 64 tokens")
    parser.add_argument("--image", type=int, default=128, help="pixels in each direction")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--ratio", type=float, default=0.001)
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=SHOWN)
    add_options(parser)
    args = parser.parse_args(argv)
    return on_networks(
        args,
        lambda ranks, laboratory: measure_all(args, ranks, laboratory),
        lambda ranks, found, network: report(args, ranks, found, network),
    )


if __name__ == "__main__":
    sys.exit(main())
