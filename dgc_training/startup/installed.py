"""Imported first by train.py: prints the first line of a run, or a message if a required package is not installed.

PyTorch takes seconds to load, so the line is printed before that. Searches for garbage would take a quarter of
those seconds, since each visits all objects of PyTorch. train.py begins with them when the run is built.
"""

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import __main__
from dgc.launch import started_by
from dgc_training.launcher import print_error

NEEDED = ("torch", "omegaconf")
# With these options, standard output has what was asked for, and nothing else.
ONLY_ANSWER = {"--print-config", "--evaluate", "--help", "-h"}


def first_line(words: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """The line of this process; None: it prints none. words: the program and its arguments."""
    started = started_by(environment)
    if Path(words[0]).name != "train.py" or ONLY_ANSWER & set(words) or (started is not None and started.rank):
        return None
    ranks = "1 process" if started is None else f"{started.size} ranks started by {started.launcher.name}"
    return f"train.py: {ranks}; loading PyTorch"


# Not of sys.argv: a data worker has the arguments of its rank, and imports train.py too.
program = getattr(__main__, "__file__", None) or ""
if Path(program).name == "train.py":
    gc.disable()

missing = [name for name in NEEDED if find_spec(name) is None]
if missing:
    raise SystemExit(
        print_error(
            f"train.py: {sys.executable} has no {missing[0]}. Run `make setup` in the repository, then "
            "`source .venv/bin/activate`, or start train.py with the Python of your environment."
        )
    )

if (line := first_line([program, *sys.argv[1:]], os.environ)) is not None:
    print(line, flush=True)
