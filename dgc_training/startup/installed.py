"""Imported first by train.py: prints one message if a required package is not installed."""

import sys
from importlib.util import find_spec

from dgc_training.launcher import print_error

NEEDED = ("torch", "omegaconf")

missing = [name for name in NEEDED if find_spec(name) is None]
if missing:
    raise SystemExit(
        print_error(
            f"train.py: {sys.executable} has no {missing[0]}. Run `make setup` in the repository, then "
            "`source .venv/bin/activate`, or start train.py with the Python of your environment."
        )
    )
