"""Finds the terminal of standard output or standard error, and whether to use colours.

Under mpirun the descriptors of a rank are not conclusive: Open MPI gives every rank a pseudo-terminal as standard
output, even if its own output goes to a file, and a pipe as standard error. The descriptors of mpirun count
instead.
"""

import os
from pathlib import Path

LAUNCHERS = ("mpirun", "mpiexec", "orterun", "prterun")
# Options of mpirun that prefix or redirect lines. A progress bar, which redraws its line, does not work with them.
REDIRECTING = ("tag-output", "timestamp-output", "output", "output-filename", "xml")
UNTAGGED = ("orte_tag_output", "0")  # a parameter after -mca, which overrides --tag-output, as of horovodrun


def terminal_of(descriptor: int) -> str | None:
    """The path of the terminal behind `descriptor` (1 or 2); None if it is not a terminal."""
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return os.ttyname(descriptor) if os.isatty(descriptor) else None
    parent = Path(f"/proc/{os.getppid()}")
    try:
        words = (parent / "cmdline").read_bytes().decode(errors="replace").split("\0")
        path = os.readlink(parent / f"fd/{descriptor}")
    except OSError:  # no /proc on this system, or another user's process
        return None
    options = {word.lstrip("-") for word in words if word.startswith("-")}
    if UNTAGGED in zip(words, words[1:], strict=False):
        options.discard("tag-output")
    prefixed = not options.isdisjoint(REDIRECTING)
    if Path(words[0]).name not in LAUNCHERS or prefixed:
        return None
    return path if path.startswith(("/dev/pts/", "/dev/tty")) else None


def columns(terminal: str) -> int:
    """The width of a terminal; 80 if it is unknown."""
    with open(terminal) as opened:
        return os.get_terminal_size(opened.fileno()).columns or 80


def wants_colour(terminal: str | None) -> bool:
    """Whether text for this terminal may have colours: https://no-color.org."""
    return terminal is not None and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
