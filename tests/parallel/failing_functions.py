"""Functions that fail on the ranks of a group."""

import os
import time
from typing import Any


def rank_and_process(transport: Any) -> tuple[int, int]:
    return transport.rank, os.getpid()


def fails(transport: Any) -> None:
    raise KeyError("of the function")


def hangs(transport: Any) -> None:
    time.sleep(10_000)
