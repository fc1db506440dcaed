"""The output of rank 0 during training: a table with a row for each epoch, and a progress bar within an epoch.

The bar is drawn if standard output is a terminal, also through mpirun. Otherwise a line is printed every 10
seconds. Bar and table both use standard output: mpirun forwards the two streams independently, so a bar on
standard error would overwrite rows. A column has the name of its TensorBoard tag without the group.

Under mpirun the descriptors of a rank are not conclusive: Open MPI gives every rank a pseudo-terminal as standard
output, even if its own output goes to a file, and a pipe as standard error. The descriptors of mpirun count
instead.
"""

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from dgc_training.launcher import terminal_of
from dgc_training.logging.formatting import human_bytes, result_text

SECONDS_PER_LINE = 10.0  # within an epoch, without a terminal
BAR = "{desc} |{bar}| {n_fmt}/{total_fmt}, {remaining} left{postfix}"
BOLD, GREEN, RESET = "\x1b[1m", "\x1b[1;32m", "\x1b[0m"


def clock(seconds: float) -> str:
    """Minutes and seconds as in the bar: 02:05, 1:02:05."""
    hours, rest = divmod(max(0, round(seconds)), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60:02}:{rest % 60:02}"


class Console:
    """Prints the table and the progress bar, on rank 0 only.

    Args:
        result: tag of the result that the table shows; None if nothing is evaluated.
        item: what rates count: "sample" or "token".
    """

    def __init__(
        self, rank: int, num_epochs: int, steps_per_epoch: int, result: str | None, item: str = "sample"
    ) -> None:
        self.is_on = rank == 0
        self.num_epochs, self.steps_per_epoch, self.result = num_epochs, steps_per_epoch, result
        self.items = f"{item}s"
        self.terminal = terminal_of(1) if self.is_on else None
        self.colour = wants_colour(self.terminal)
        self.bar: Any = None
        self.header: dict[str, int] = {}  # the columns printed last, and their widths
        self.last_line = time.perf_counter()
        self.began = (-1, 0, 0.0)  # epoch, first step in it and its time; the time left is computed from them

    def print(self, text: str) -> None:
        """Prints one or more lines to standard output, above the progress bar."""
        if self.is_on:
            self.last_line = time.perf_counter()
            if self.bar is not None:
                self.bar.clear()
            print(text, flush=True)

    def step(self, epoch: int, step: int, state: str) -> None:
        """Call after each step. step: counted from 1. epoch: counted from 0. state: text to show; may be empty."""
        if not self.is_on:
            return
        if self.terminal is not None:
            self._advance(epoch, step, state)
            return
        now = time.perf_counter()
        if self.began[0] != epoch:
            self.began = (epoch, step, now)
        if now - self.last_line > SECONDS_PER_LINE:
            done = step - self.began[1]
            seconds = (now - self.began[2]) / done * (self.steps_per_epoch - step) if done else 0.0
            left = f", {clock(seconds)} left" if done else ""
            text = f"  epoch {epoch + 1}/{self.num_epochs}, step {step}/{self.steps_per_epoch}{left}"
            self.print(f"{text}: {state}" if state else text)

    def _advance(self, epoch: int, step: int, state: str) -> None:
        if self.bar is None:
            from tqdm import tqdm  # type: ignore[import-untyped]

            assert self.terminal is not None
            self.bar = tqdm(
                desc=f"epoch {epoch + 1}/{self.num_epochs}",
                total=self.steps_per_epoch,
                initial=step - 1,
                leave=False,
                bar_format=BAR,
                file=sys.stdout,
                ncols=columns(self.terminal),
            )
        self.bar.set_postfix_str(state, refresh=False)
        self.bar.update()

    def end_epoch(self, epoch: int, values: Mapping[str, float], best: bool) -> None:
        """Prints the row of an epoch.

        Args:
            epoch: counted from 1.
            values: loss and result, and the last values of other tags. If a run was resumed after the epoch's last
                step, only loss and result are known.
            best: whether the result is the best so far.
        """
        self.close()
        cells = {"epoch": f"{epoch}/{self.num_epochs}", "loss": f"{values['train/loss']:.4f}"}
        if self.result is not None:
            cells[self.result.rpartition("/")[2]] = result_text(values[self.result])
        if "train/lr" in values:
            cells["lr"] = f"{values['train/lr']:.3g}"
            cells["compress_ratio"] = f"{values['compression/compress_ratio']:.4g}"
            if values.get("bytes/dense_wire_per_step"):
                cells["wire/step"] = human_bytes(values["bytes/wire_per_step"])
                cells["wire/dense"] = f"{100 * values['bytes/wire_over_dense']:.3g}%"
            cells[f"{self.items}/s"] = f"{values[f'time/{self.items}_per_second']:.0f}"
        min_widths = {"epoch": len(f"{self.num_epochs}/{self.num_epochs}"), "loss": 6, "lr": 7}
        widths = {name: max(len(name), min_widths.get(name, 0)) for name in cells}
        if self.header != widths:
            self.print(self._styled(" ".join(f"{name:>{widths[name]}}" for name in cells), BOLD))
            self.header = widths
        row = {name: f"{cell:>{widths[name]}}" for name, cell in cells.items()}
        if best and self.result is not None:
            name = self.result.rpartition("/")[2]
            row[name] = self._styled(row[name], GREEN)
        self.print(" ".join(row.values()))

    def _styled(self, text: str, style: str) -> str:
        return f"{style}{text}{RESET}" if self.colour else text

    def close(self) -> None:
        """Removes the bar. The next step draws it again."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def columns(terminal: str) -> int:
    """The width of a terminal; 80 if it is unknown."""
    with open(terminal) as opened:
        return os.get_terminal_size(opened.fileno()).columns or 80


def wants_colour(terminal: str | None) -> bool:
    """Whether text for this terminal may have colours: https://no-color.org."""
    return terminal is not None and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
