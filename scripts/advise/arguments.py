"""The advisor's command line for experiments of train.py."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dgc.advisor.arguments import add_network, check_network, check_output
from dgc_training.startup.arguments import ConfigsParser
from scripts.advise.methods import NAMES

EPILOG = """\
examples:
  python -m scripts.advise --configs configs/digits/cnn.py --hosts 4 --rate 1gbit
  horovodrun -np 4 -H a:2,b:2 python -m scripts.advise --configs configs/cifar/resnet20.py --verify 30
  torchrun --nproc-per-node 4 -m scripts.advise --configs configs/imagenet/resnet50.py --input-shape 3 224 224

docs/advise.md describes what is measured and what is predicted.
"""


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options and the remaining words, which are config overrides, in order."""
    parser = ConfigsParser(
        "python -m scripts.advise",
        "advise",
        "Predicts which method of compression makes a step fastest on a network, if any does.",
        EPILOG,
        files="the experiment, without files of a method",
    )
    add_network(parser, NAMES)
    parser.add_argument(
        "--input-shape",
        nargs="+",
        type=int,
        metavar="N",
        help="of one sample, such as 3 224 224: random inputs where the data set is missing",
    )
    parser.add_argument("--devices", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw step times against bandwidth, as PNG or SVG"
    )
    args, overrides = parser.parse_known_args(argv)
    return args, overrides


def check_arguments(args: argparse.Namespace, ranks: int) -> None:
    """Raises ValueError if the options contradict each other or the launcher, or name no network.

    Args:
        args: the options.
        ranks: number of ranks that the launcher started; 1 without a launcher.
    """
    check_network(args, ranks)
    if args.input_shape is not None and not all(1 <= length < 2**31 for length in args.input_shape):
        raise ValueError(f"--input-shape is {args.input_shape}; every length must be at least 1 and below 2**31")
    check_output(args.plot, "--plot")
    if args.plot is not None and args.plot.suffix not in (".png", ".svg"):
        raise ValueError(f"--plot: {args.plot} must end in .png or .svg")
