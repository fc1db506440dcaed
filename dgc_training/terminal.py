"""Whether a person watches: where standard output and standard error end, and whether colour is wanted there.

Under mpirun a rank's own descriptors say nothing: Open MPI gives every rank a pseudo-terminal as standard output,
also where its own goes to a file, and a pipe as standard error. What counts there is where mpirun's go.
"""

import os
from pathlib import Path

LAUNCHERS = ("mpirun", "mpiexec", "orterun", "prterun")
# Options of mpirun that prefix lines or send them elsewhere: a line that is drawn again and again does not fit.
REDIRECTING = ("tag-output", "timestamp-output", "output", "output-filename", "xml")


def terminal_of(descriptor: int) -> str | None:
    """The terminal that shows what is written to `descriptor`, 1 or 2; None where it is none."""
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return os.ttyname(descriptor) if os.isatty(descriptor) else None
    parent = Path(f"/proc/{os.getppid()}")
    try:
        words = (parent / "cmdline").read_bytes().decode(errors="replace").split("\0")
        path = os.readlink(parent / f"fd/{descriptor}")
    except OSError:  # no /proc on this system, or another user's process
        return None
    prefixed = any(word.startswith("-") and word.lstrip("-") in REDIRECTING for word in words)
    if Path(words[0]).name not in LAUNCHERS or prefixed:
        return None
    return path if path.startswith(("/dev/pts/", "/dev/tty")) else None


def columns(terminal: str) -> int:
    """The width of a terminal; 80 where it is not known."""
    with open(terminal) as opened:
        return os.get_terminal_size(opened.fileno()).columns or 80


def wants_colour(terminal: str | None) -> bool:
    """Whether text for this terminal may have colours: https://no-color.org."""
    return terminal is not None and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
