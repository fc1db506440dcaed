"""Writes one HTML file about one or several runs.

    python -m scripts.report 'runs/[digits.cnn+dgc.wm5].np4'
    python -m scripts.report --out report.html dense=runs/digits.cnn.np4 'runs/[digits.cnn+dgc.wm5].np4'

The file has the results, the settings that differ, the metric against epochs, bytes and time, the loss, the bytes
per step, and where the time of a step went. It needs no other file and no network. The same runs give the same
file.

A run is read as by `scripts.plot`. A folder of runs stands for the runs in it. An unfinished run is shown as far
as it has come, and marked.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from dgc_training.launcher import escape_unprintable
from dgc_training.logging.formatting import plural
from scripts.plot import find_runs
from scripts.report_page import page
from scripts.report_runs import read_reported
from scripts.run_files import PlotError, printable


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "runs", nargs="+", metavar="RUN_DIR", help="a run directory, LABEL=RUN_DIR, or a folder of runs"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: report.html, in the directory of a single run or here"
    )
    args = parser.parse_args(argv)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            runs = read_reported(find_runs(args.runs))
            text = page(runs, [str(warning.message) for warning in caught])
        out = args.out or (runs[0].directory if len(runs) == 1 else Path()) / "report.html"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except (PlotError, OSError) as error:
        print(f"report: {printable(error)}", file=sys.stderr)
        return 2
    for warning in caught:
        print(printable(f"report: {warning.message}"), file=sys.stderr)
    print(printable(f"{out}: {plural(len(runs), 'run')}"))
    return 0


if __name__ == "__main__":
    escape_unprintable()
    sys.exit(main())
