"""Reads runs without CSV logs from their TensorBoard files. `dgc_training.logging.tags` lists the tags."""

from bisect import bisect_right
from importlib import import_module
from pathlib import Path
from typing import Any

from dgc_training.logging.metric import unit_of
from scripts.plot_runs import Curve, NotBegun, Run, algorithm, read_config, setting_of

SETTINGS = "_hparams_/session_start_info"
# The tag that is written last at every point. A killed run's last point may lack it, and is then left out.
LAST = "time/elapsed"


def load_events(directory: Path) -> Any:
    """The TensorBoard files of a directory, as TensorBoard's `EventAccumulator`.

    Raises NotBegun if there is no complete point of a run yet.
    """
    events_of = import_module("tensorboard.backend.event_processing.event_accumulator")  # slow to import

    events = events_of.EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    if SETTINGS not in events.summary_metadata or LAST not in events.Tags()["scalars"]:
        raise NotBegun(
            f"{directory} has neither CSV files (train.csv=True) nor TensorBoard files of a run that has begun to "
            "train. Give the directory of a run: runs/NAME.npN"
        )
    return events


def read_events(directory: Path, label: str | None = None) -> Run:
    """Reads the run of a directory. label: None uses the algorithm from its config.yaml.

    The run has no accuracy in training, since TensorBoard files have only the training loss.
    """
    events = load_events(directory)
    tags = events.Tags()["scalars"]
    settings = _settings(events.summary_metadata[SETTINGS].plugin_data.content)
    samples = [point.step for point in events.Scalars(LAST)]
    steps, seconds, wire = (
        [float(point.value) for point in events.Scalars(tag)]
        for tag in ("train/steps", "time/elapsed", "bytes/wire")
    )

    def curve(tag: str) -> Curve:
        drawn = Curve()
        for point in events.Scalars(tag) if tag in tags else ():
            if point.step > samples[-1]:
                break
            i = bisect_right(samples, point.step) - 1
            drawn.add(steps[i], seconds[i], wire[i], point.value)
        return drawn

    config = read_config(directory / "config.yaml")
    metric = str(settings["train.metric"])
    return Run(
        directory=directory,
        label=label if label is not None else algorithm(config, directory),
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
