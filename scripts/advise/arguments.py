"""The advisor's command line, and quantities with units."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from dgc_training.faults.failure import UsageError
from dgc_training.startup.arguments import ConfigsParser
from scripts.advise.methods import NAMES, UNCOMPRESSED

RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}  # bits per second
TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
EPILOG = """\
examples:
  python -m scripts.advise --configs configs/digits/cnn.py --hosts 4 --rate 1gbit
  horovodrun -np 4 -H a:2,b:2 python -m scripts.advise --configs configs/cifar/resnet20.py --verify 30
  torchrun --nproc-per-node 4 -m scripts.advise --configs configs/imagenet/resnet50.py --input-shape 3 224 224

docs/advise.md describes what is measured and what is predicted.
"""


def quantity(text: str, units: dict[str, float], what: str) -> float:
    """The number in "1gbit" or "50 us". Raises UsageError if it has another form."""
    found = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]+?)(?:/s|ps)?", text.strip().lower())
    try:
        if found is None or found[2] not in units:
            raise ValueError
        value = float(found[1]) * units[found[2]]
    except ValueError:
        raise UsageError(f"{what} is {text!r}: write a number and a unit of {', '.join(units)}") from None
    return value


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options and the remaining words, which are config overrides, in order."""
    parser = ConfigsParser(
        "python -m scripts.advise",
        "advise",
        "Predicts which method of compression makes a step fastest on a network, if any does.",
        EPILOG,
        files="the experiment, without files of a method",
    )
    parser.add_argument("--hosts", type=int, metavar="N", help="on paper: number of machines")
    parser.add_argument("--rate", metavar="RATE", help="on paper: of a machine's link, such as 1gbit")
    parser.add_argument("--ranks-per-host", type=int, metavar="N", help="on paper: default 1")
    parser.add_argument("--latency", metavar="TIME", help="on paper: of a message between machines; default 50us")
    parser.add_argument(
        "--inner-rate", metavar="RATE", help="on paper: of a rank inside its machine; default 80gbit"
    )
    parser.add_argument(
        "--input-shape",
        nargs="+",
        type=int,
        metavar="N",
        help="of one sample, such as 3 224 224: random inputs where the data set is missing",
    )
    parser.add_argument("--methods", nargs="+", choices=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of each measurement; default 5")
    parser.add_argument(
        "--verify", type=int, metavar="N", help="also measure N steps of the best methods, under a launcher"
    )
    parser.add_argument("--verify-all", action="store_true", help="with --verify: of all methods")
    parser.add_argument("--devices", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw step times against bandwidth, as PNG or SVG"
    )
    args, overrides = parser.parse_known_args(argv)
    return args, overrides


def check_arguments(args: argparse.Namespace, ranks: int) -> None:
    """Raises UsageError if the options contradict each other or the launcher, or name no network.

    Args:
        args: the options.
        ranks: number of ranks that the launcher started; 1 without a launcher.
    """
    paper = {name: getattr(args, name) for name in ("hosts", "rate", "ranks_per_host", "latency", "inner_rate")}
    given = [f"--{name.replace('_', '-')}" for name, value in paper.items() if value is not None]
    if ranks > 1 and given:
        raise UsageError(f"under a launcher the network is measured: leave out {', '.join(given)}")
    if ranks == 1 and (args.hosts is None or (args.rate is None and args.hosts != 1)):
        raise UsageError(
            "there is no network: start the advisor on several ranks (mpirun, horovodrun, torchrun), or describe "
            "one with --hosts and --rate"
        )
    for name in ("hosts", "ranks_per_host", "repeats", "verify"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if args.verify_all and args.verify is None:
        raise UsageError("--verify-all needs the number of steps: add --verify N")
    if args.verify is not None and ranks == 1:
        raise UsageError("--verify needs the ranks: start the advisor with mpirun, horovodrun or torchrun")
    if ranks == 1 and args.hosts * (args.ranks_per_host or 1) < 2:
        raise UsageError("one rank exchanges nothing: --hosts or --ranks-per-host must be 2 or more")
    unused = [name for name in ("--rate", "--latency") if name in given]
    if ranks == 1 and args.hosts == 1 and unused:
        raise UsageError(
            f"with --hosts 1 no message leaves the machine: leave out {', '.join(unused)}; the rate between its "
            "ranks is --inner-rate"
        )
    if ranks == 1 and args.inner_rate is not None and (args.ranks_per_host or 1) == 1:
        raise UsageError("--inner-rate is that between ranks of one machine: add --ranks-per-host of 2 or more")
    if args.input_shape is not None and min(args.input_shape) < 1:
        raise UsageError(f"--input-shape is {args.input_shape}; every length must be at least 1")
    if args.methods is not None and not set(args.methods) & set(UNCOMPRESSED):
        raise UsageError(f"--methods needs one of {', '.join(UNCOMPRESSED)} to compare with")
    for name in ("json", "plot"):
        file = getattr(args, name)
        if file is not None and not file.absolute().parent.is_dir():
            raise UsageError(f"--{name}: there is no folder {file.absolute().parent}")
    if args.plot is not None and args.plot.suffix not in (".png", ".svg"):
        raise UsageError(f"--plot: {args.plot} must end in .png or .svg")
