"""The file format of a rank's CSV file: its columns, and how a resumed job finds its position in the file."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from dgc_training.atomic_write import write_atomically

TIMES = ("BT(s)", "NT(s)", "DT(s)")
SCORES = ("Loss", "Prec@1", "Prec@5")
LATEST = ("consensus", "weight", "staleness")
SUMMED = ("payload_bytes", "wire_bytes", "wait(s)")
COLUMNS = (
    *("Epoch", "itr"),
    *(f"{kind}{name}" for name in TIMES for kind in ("", "avg:", "std:")),
    *(f"{kind}{name}" for name in SCORES for kind in ("", "avg:")),
    *("val", "consensus", "weight", "payload_bytes", "wire_bytes", "staleness", "wait(s)", "elapsed(s)"),
)
PREAMBLE = 5  # lines before the first row
# The itr of a row after validation. It sorts after every step of its epoch.
END = -1


def open_file(path: Path, preamble: Sequence[str], last: Sequence[int] | None) -> TextIO:
    """Opens the file for appending after row `last` (Epoch, itr), and drops later rows.

    A new file is begun if `last` is None, or if the existing file has another format.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    if last is not None and path.exists():
        # Text after the last line break is a row that was being written when the job was killed.
        lines = path.read_text(errors="replace").split("\n")[:-1]
    kept = []
    if len(lines) >= PREAMBLE and lines[PREAMBLE - 1] == preamble[-1] and last is not None:
        kept = [line for line in lines[PREAMBLE:] if _sort_key(line) <= _position(*last)]
    text = "".join(f"{line}\n" for line in (*preamble, *kept))
    write_atomically(path, lambda file: file.write(text.encode()))
    return path.open("a")


def _position(epoch: int, itr: int) -> tuple[float, float]:
    return (epoch, math.inf if itr == END else itr)


def _sort_key(line: str) -> tuple[float, float]:
    """The sort key of a row. A line that is not a row sorts after all rows."""
    cells = line.split(",")
    try:
        return _position(int(cells[0]), int(cells[1])) if len(cells) == len(COLUMNS) else (math.inf, 0.0)
    except ValueError:
        return (math.inf, 0.0)
