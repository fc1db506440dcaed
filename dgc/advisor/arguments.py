"""Options of the advisor's command lines: the network on paper, the methods, and what is written."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dgc.advisor.methods import LIMITED, UNCOMPRESSED, Method
from dgc.units import PERCENT, quantity

LARGEST = {"hosts": 16384, "ranks_per_host": 1024, "repeats": 10_000, "verify": 1_000_000}
MOST_LOST = "0.5%"
MOST_RANKS = 16384  # the traffic of one rank takes a minute to record, in a time that grows with their number


def add_network(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Adds the options that do not depend on the model."""
    parser.add_argument("--hosts", type=int, metavar="N", help="on paper: number of machines")
    parser.add_argument("--rate", metavar="RATE", help="on paper: of a machine's link, such as 1gbit")
    parser.add_argument("--ranks-per-host", type=int, metavar="N", help="on paper: default 1")
    parser.add_argument("--latency", metavar="TIME", help="on paper: of a message between machines; default 50us")
    parser.add_argument(
        "--inner-rate", metavar="RATE", help="on paper: of a rank inside its machine; default 80gbit"
    )
    parser.add_argument("--methods", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--dense-share",
        type=float,
        metavar="SHARE",
        help="of a run's steps, before onebit-adam and dgc-adam compress; default 0.2 and 0.15",
    )
    parser.add_argument(
        "--loss",
        metavar="PERCENT",
        help="with Adam or Muon, the most that a recommended method lost to dense training where it was measured; "
        f"default {MOST_LOST.replace('%', '%%')}",
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of each measurement; default 5")
    parser.add_argument(
        "--verify", type=int, metavar="N", help="also measure N steps of the best methods, under a launcher"
    )
    parser.add_argument("--verify-all", action="store_true", help="with --verify: of all methods")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers")


def asked(args: argparse.Namespace, methods: Sequence[Method]) -> list[Method]:
    """The methods to compare, with the share of dense steps that was given."""
    named = [method for method in methods if args.methods is None or method.name in args.methods]
    if args.dense_share is None:
        return named
    return [replace(method, dense_share=args.dense_share if method.dense_share else 0.0) for method in named]


def limit_of(args: argparse.Namespace) -> float:
    """The limit of --loss in percent. Raises ValueError if it is none."""
    return quantity(args.loss or MOST_LOST, PERCENT, "--loss", ("0%", "100%"))


def check_loss(args: argparse.Namespace, family: str, optimizer: str) -> None:
    """Raises ValueError if --loss is no percentage, or has no effect with the optimizer."""
    limit_of(args)
    if args.loss is not None and family not in LIMITED:
        raise ValueError(
            f"--loss is for Adam, AdamW and Muon, and the optimizer is {optimizer}: with others no method is left "
            "out for its quality"
        )


def check_network(args: argparse.Namespace, ranks: int) -> None:
    """Raises ValueError if the options contradict each other or the launcher, or name no network.

    Args:
        args: the options.
        ranks: number of ranks that the launcher started; 1 without a launcher.
    """
    paper = {name: getattr(args, name) for name in ("hosts", "rate", "ranks_per_host", "latency", "inner_rate")}
    given = [f"--{name.replace('_', '-')}" for name, value in paper.items() if value is not None]
    if ranks > 1 and given:
        raise ValueError(f"under a launcher the network is measured: leave out {', '.join(given)}")
    if ranks == 1 and (args.hosts is None or (args.rate is None and args.hosts != 1)):
        raise ValueError(
            "there is no network: start the advisor on several ranks (mpirun, horovodrun, torchrun), or describe "
            "one with --hosts and --rate"
        )
    for name, most in LARGEST.items():
        value = getattr(args, name)
        if value is not None and not 1 <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be from 1 to {most}")
    if args.dense_share is not None and not 0 <= args.dense_share < 1:
        raise ValueError(f"--dense-share is {args.dense_share}; it must be at least 0 and below 1")
    if args.verify_all and args.verify is None:
        raise ValueError("--verify-all needs the number of steps: add --verify N")
    if args.verify is not None and ranks == 1:
        raise ValueError("--verify needs the ranks: start the advisor with mpirun, horovodrun or torchrun")
    described = (args.hosts or 1) * (args.ranks_per_host or 1)
    if ranks == 1 and described < 2:
        raise ValueError("one rank exchanges nothing: --hosts or --ranks-per-host must be 2 or more")
    if described > MOST_RANKS:
        raise ValueError(f"--hosts times --ranks-per-host is {described}; it must be at most {MOST_RANKS}")
    unused = [name for name in ("--rate", "--latency") if name in given]
    if ranks == 1 and args.hosts == 1 and unused:
        raise ValueError(
            f"with --hosts 1 no message leaves the machine: leave out {', '.join(unused)}; the rate between its "
            "ranks is --inner-rate"
        )
    if ranks == 1 and args.inner_rate is not None and (args.ranks_per_host or 1) == 1:
        raise ValueError("--inner-rate is that between ranks of one machine: add --ranks-per-host of 2 or more")
    if args.methods is not None and not set(args.methods) & set(UNCOMPRESSED):
        raise ValueError(f"--methods needs one of {', '.join(UNCOMPRESSED)} to compare with")
    check_output(args.json, "--json")


def check_output(file: Path | None, option: str) -> None:
    """Raises ValueError if a file that will be written cannot be: it is a folder, or has none, or is protected."""
    if file is None:
        return
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{option}: there is no folder {folder}")
    if file.is_dir():
        raise ValueError(f"{option}: {file} is a folder; name a file")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ValueError(f"{option}: {file} cannot be written")
