"""train.py on simulated ranks of this process."""

from collections.abc import Sequence

import train
from dgc.comm.lockstep import LockstepWorld
from dgc_training.config import load
from dgc_training.startup.arguments import parse_arguments


def train_on(size: int, words: Sequence[str], local_size: int | None = None) -> list[int]:
    """The exit status of each rank of a run with these words of the command line."""
    args, overrides = parse_arguments(words)
    tree = load(args.configs, overrides)
    return LockstepWorld(size, local_size).run(lambda transport: train.run(args, tree, transport))
