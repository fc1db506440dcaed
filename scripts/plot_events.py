"""Reads runs without CSV logs from their TensorBoard files. `dgc_training.logging.scalars` lists the tags."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.plot_runs import Curve, NotBegun, Run, algorithm, setting_of, unit_of
from scripts.run_files import LARGEST, PlotError, printable, read_config

SETTINGS = "_hparams_/session_start_info"
# The tag that is written last at every point. A killed run's last point may lack it, and is then left out.
LAST = "time/elapsed"
STEPS, WIRE = "train/steps", "bytes/wire"


@dataclass
class Events:
    """The TensorBoard files of a run.

    Attributes:
        settings: the hyper-parameters.
        scalars: by tag, points (samples, value). Values that are not finite are NaN.
    """

    settings: dict[str, Any]
    scalars: dict[str, list[tuple[int, float]]]

    def values(self, tag: str) -> dict[int, float]:
        """The values of a tag by samples; empty without such a tag."""
        return dict(self.scalars.get(tag, ()))


def load_events(directory: Path) -> Events:
    """The TensorBoard files of a directory.

    Raises NotBegun if there is no complete point of a run yet, and PlotError if the files are damaged.
    """
    events_of = import_module("tensorboard.backend.event_processing.event_accumulator")  # slow to import
    try:
        read = events_of.EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
        begun = SETTINGS in read.summary_metadata and LAST in read.Tags()["scalars"]
        found = Events(
            _settings(read.summary_metadata[SETTINGS].plugin_data.content) if begun else {},
            {
                tag: [(p.step, p.value if abs(p.value) < LARGEST else math.nan) for p in read.Scalars(tag)]
                for tag in read.Tags()["scalars"]
            },
        )
    except Exception as error:  # TensorBoard's reader has no error of its own for damaged files
        cause = printable(" ".join(f"{type(error).__name__}: {error}".split()))[:200]
        raise PlotError(f"the TensorBoard files in {directory} cannot be read: {cause}") from None
    if not begun:
        raise NotBegun(
            f"{directory} has neither CSV files of ranks nor TensorBoard files of a run that has begun to "
            "train. Give the directory of a run: runs/NAME.npN"
        )
    _check(found, directory)
    return found


def _check(events: Events, directory: Path) -> None:
    complete = len(events.scalars[LAST])
    counts = ("ranks", "train.batch_size", "train.num_batches_per_step")
    if missing := [key for key in counts if not 0 < _number(events.settings.get(key)) < LARGEST]:
        raise PlotError(f"the TensorBoard files in {directory} are damaged: {missing[0]} is not a positive number")
    for tag, points in {STEPS: [], WIRE: [], **events.scalars}.items():
        if tag in (STEPS, WIRE) and len(points) < complete:
            raise PlotError(f"the TensorBoard files in {directory} are damaged: {tag} is incomplete")
        if tag.startswith((STEPS, "time/", "bytes/")) and not all(value >= 0 for _, value in points):
            raise PlotError(f"the TensorBoard files in {directory} are damaged: {tag} is negative or not a number")
    if not events.scalars[STEPS][complete - 1][1] > 0:
        raise PlotError(f"the TensorBoard files in {directory} are damaged: {STEPS} is 0")


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def read_events(directory: Path, label: str | None = None) -> Run:
    """Reads the run of a directory. label: None uses the algorithm from its config.yaml.

    The run has no accuracy in training, since TensorBoard files have only the training loss.
    """
    events = load_events(directory)
    settings = events.settings
    samples = [sample for sample, _ in events.scalars[LAST]]
    steps, seconds, wire = ([value for _, value in events.scalars[tag]] for tag in (STEPS, LAST, WIRE))

    def curve(tag: str) -> Curve:
        drawn = Curve()
        for sample, value in events.scalars.get(tag, ()):
            if sample > samples[-1]:
                break
            i = bisect_right(samples, sample) - 1
            drawn.add(steps[i], seconds[i], wire[i], value)
        return drawn

    config = read_config(directory / "config.yaml")
    metric = printable(settings.get("train.metric", ""))
    return Run(
        directory=directory,
        label=printable(label if label is not None else algorithm(config, directory)),
        ranks=int(settings["ranks"]),
        batch=int(settings["train.batch_size"] * settings["train.num_batches_per_step"]),
        seconds_per_step=seconds[-1] / steps[-1],
        metric=metric,
        unit=unit_of(config, {"metric": metric}),
        training=Curve(),
        validation=curve(metric),
        loss=curve("train/loss"),
        setting=setting_of(config),
    )


def _settings(content: bytes) -> dict[str, Any]:
    data = import_module("tensorboard.plugins.hparams.plugin_data_pb2")
    values = data.HParamsPluginData.FromString(content).session_start_info.hparams
    return {key: getattr(value, value.WhichOneof("kind")) for key, value in values.items()}
