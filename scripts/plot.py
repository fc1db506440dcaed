"""Plots runs: error, metric against bytes, scaling and loss, as PNG and SVG.

    python -m scripts.plot 'runs/[imagenet.resnet50+gossip.sgp].np8' runs/imagenet.resnet50.np8
    python -m scripts.plot --out figures 'SGP, 10 Gbit/s=runs/a' 'SGP, 100 Gbit/s=runs/b'

A folder of runs stands for the runs in it.

    error      training and validation error after each epoch, against time and against iterations
    bytes      the metric (train.metric) after each epoch, against the wire bytes of one rank (docs/bytes.md)
    scaling    average time per iteration and samples per second, against the number of ranks
    loss       training loss against optimizer steps

The error is 100 % less an accuracy. Any other metric is drawn as it is, without the metric of training. A run with
CSV files (`scripts.gossip.rank_csv`) is read from these. Any other run is read from its TensorBoard files, which
have no training error. The label of a run is its algorithm (from its config.yaml), or the text before "=". Runs
with the same label on different numbers of ranks form one line of `scaling`. Time covers all training steps,
without validation.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from dgc_training.launcher import escape_unprintable
from scripts.gossip.csv_runs import has_csv, read_run
from scripts.plot_events import read_events
from scripts.plot_figures import STYLE, bytes_figure, error_figure, loss_figure, scaling_figure
from scripts.plot_runs import Run, check_comparable
from scripts.run_files import PlotError


def split_label(word: str) -> tuple[str | None, Path]:
    """The label and the directory in DIR or LABEL=DIR. An existing directory with "=" in its name is a DIR."""
    label, equals, directory = word.partition("=")
    if Path(word).is_dir() or not equals:
        label, directory = "", word
    if not Path(directory).is_dir():
        raise PlotError(f"there is no run directory {directory}")
    return label or None, Path(directory)


def read(word: str) -> Run:
    """Reads a run from DIR or LABEL=DIR."""
    label, directory = split_label(word)
    reader = read_run if has_csv(directory) else read_events
    return reader(directory, label)


def find_runs(words: Sequence[str]) -> list[str]:
    """The words, with the runs of a folder in its place. What has no run is left out with a warning.

    Raises PlotError if a word names nothing, or several runs have the same label.
    """
    found: list[str] = []
    without: list[str] = []
    for word in words:
        if Path(word).is_file():
            without.append(word)
            continue
        label, directory = split_label(word)
        runs = runs_below(directory)
        if label is not None and len(runs) > 1:
            raise PlotError(f"{word}: {directory} has {len(runs)} runs; give each its own label, or none")
        found += [str(run) if label is None else f"{label}={run}" for run in runs]
        without += [] if runs else [word]
    if not found:
        return list(words)  # reading them says why they are no runs
    for word in without:
        warnings.warn(f"{word} has no run and is left out", stacklevel=2)
    return found


def runs_below(directory: Path, levels: int = 3) -> list[Path]:
    """The directory, if it is one of a run; else the runs in its folders, sorted."""
    if any(directory.glob("events.out.tfevents.*")) or has_csv(directory) or (directory / "config.yaml").is_file():
        return [directory]
    folders = sorted(path for path in directory.iterdir() if path.is_dir()) if levels else []
    return [run for folder in folders for run in runs_below(folder, levels - 1)]


def draw(runs: Sequence[Run], out: Path, formats: Sequence[str]) -> list[Path]:
    """Writes the figures of `runs` and returns the files written."""
    check_comparable(runs)
    if len({run.batch for run in runs}) > 1:
        batches = ", ".join(f"{run.label} {run.batch}" for run in runs)
        warnings.warn(f"samples per rank and step differ, so iterations differ: {batches}", stacklevel=2)
    written: list[Path] = []
    with matplotlib.rc_context(STYLE):
        figures: dict[str, Figure | None] = {
            "error": error_figure(runs),
            "bytes": bytes_figure(runs),
            "scaling": scaling_figure(runs),
            "loss": loss_figure(runs),
        }
        out.mkdir(parents=True, exist_ok=True)
        for name, drawn in figures.items():
            if drawn is None:
                warnings.warn(f"no figure '{name}': no run has data for it yet", stacklevel=2)
                continue
            for suffix in formats:
                written.append(out / f"{name}.{suffix}")
                drawn.savefig(written[-1])
    return written


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.plot", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "runs", nargs="+", metavar="RUN_DIR", help="a run directory, LABEL=RUN_DIR, or a folder of runs"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/plots"), metavar="DIR", help="default: runs/plots")
    parser.add_argument("--formats", nargs="+", choices=["png", "svg", "pdf"], default=["png", "svg"])
    args = parser.parse_args(argv)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            written = draw([read(word) for word in find_runs(args.runs)], args.out, args.formats)
    except (PlotError, OSError) as error:
        print(f"plot: {error}", file=sys.stderr)
        return 2
    for warning in caught:
        print(f"plot: {warning.message}", file=sys.stderr)
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    escape_unprintable()
    sys.exit(main())
