"""The PYTHONPATH of the processes that tests start."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
STARTUP = REPOSITORY / "tests" / "startup"  # its sitecustomize.py lets processes start in half of the time


def python_path(*folders: Path | str) -> str:
    """The repository and then these folders."""
    return os.pathsep.join(map(str, [REPOSITORY, *folders, STARTUP]))
