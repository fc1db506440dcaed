"""The command line: a few options of the trainer. All other words are config overrides."""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from typing import NoReturn

from dgc_training.launcher import print_error

_EPILOG = """\
examples:
  python train.py --configs configs/digits/cnn.py configs/dgc/wm5.py --configs.train.num_epochs 20
  python train.py --configs configs/digits/cnn.py configs/dgc/wm5.py --print-config
  horovodrun -np 4 python train.py --configs configs/digits/cnn.py configs/dgc/wm5.py

configs/__init__.py is the reference of all keys, with their defaults. Any key can be set after the files, as
--configs.KEY VALUE. --print-config shows the keys and values of a stack, and trains nothing.
"""


class ConfigsParser(argparse.ArgumentParser):
    """A parser with the option --configs, whose errors are printed by one rank.

    Args:
        prog: name of the command in its usage.
        name: name of the command in its errors.
        description, epilog: texts of its help.
        files: help of --configs.
    """

    def __init__(self, prog: str, name: str, description: str, epilog: str, files: str):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, description, epilog, formatter_class=layout, allow_abbrev=False)
        self._name = name
        self.add_argument("--configs", nargs="+", action="extend", required=True, metavar="FILE", help=files)

    def error(self, message: str) -> NoReturn:
        raise SystemExit(print_error(f"{self.format_usage()}{self._name}: {message}"))


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options and the remaining words (`--configs.train.num_epochs 500`), in order."""
    parser = ConfigsParser(
        "train.py",
        "train.py",
        "Trains the model that a stack of config files describes.",
        _EPILOG,
        files="Python or YAML files, stacked left to right",
    )
    parser.add_argument(
        "--devices", choices=["auto", "cpu", "gpu"], default="auto", help="auto: a GPU if there is one"
    )
    parser.add_argument("--suffix", default="", metavar="TEXT", help="added to the run directory's name")
    parser.add_argument("--run-dir", metavar="DIR", help="use this run directory instead of runs/NAME")
    parser.add_argument(
        "--minutes", type=_minutes, default=inf, metavar="N", help="save and stop after so many, with status 75"
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--evaluate", action="store_true", help="evaluate the run's best checkpoint and stop")
    either.add_argument(
        "--no-resume", action="store_true", help="start from the beginning; rename an earlier run of the directory"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and stop")
    return parser.parse_known_args(argv)


def _minutes(text: str) -> float:
    with suppress(ValueError):
        if (number := float(text)) >= 0:
            return number
    raise argparse.ArgumentTypeError(f"it is {text!r}; it must be a number of minutes, 0 or more")
