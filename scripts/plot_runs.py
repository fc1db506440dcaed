"""A run as `scripts.plot` draws it: its label and the metric, with its unit, come from its config.

summary.json says whether lower is better. An unfinished run has the meter in its config. The metrics of a
translation have no meter: their names decide.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dgc_training.constructors import import_target
from scripts.run_files import PlotError

TOP_K = "dgc_training.meters.TopKClassMeter"
UNKNOWN = "top-1 accuracy"  # of runs without config.yaml
LOWER = re.compile(r"nll|loss|perplexity|bits_per_")
PERCENT = re.compile(r"accuracy|\bacc\b|exact_match")


def metric_of(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """The name of the metric."""
    return str((config.get("train") or {}).get("metric") or summary.get("metric") or UNKNOWN)


def is_lower_better(config: Mapping[str, Any], summary: Mapping[str, Any]) -> bool:
    """Whether a lower value of the metric is better."""
    if "lower_is_better" in summary:
        return bool(summary["lower_is_better"])
    if (target := _meter(config, summary)) is not None:
        try:
            return bool(getattr(import_target(target), "lower_is_better", False))
        except ValueError:  # a module of the user that is not here
            pass
    return LOWER.search(metric_of(config, summary)) is not None


def unit_of(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """The unit, "%". Empty if the metric is no percentage, or if this is not known."""
    is_percent = _meter(config, summary) == TOP_K or PERCENT.search(metric_of(config, summary))
    return "%" if is_percent else ""


def _meter(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str | None:
    """The import path of the metric's meter. None: it is not in the config."""
    name = metric_of(config, summary)
    for pattern, node in ((config.get("train") or {}).get("meters") or {}).items():
        if re.fullmatch(re.escape(pattern).replace(re.escape("{}"), ".+"), name) and "_target_" in (node or {}):
            return str(node["_target_"])
    return None


NAMES = {"DenseCompressor": "AR-SGD", "DPSGD": "D-PSGD", "ADPSGD": "AD-PSGD"}


class NotBegun(PlotError):
    """A directory has no point of a run."""


@dataclass
class Curve:
    """Points of one line, with x in three units. wire: bytes that one rank has sent; NaN if unknown."""

    steps: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    wire: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)

    def add(self, steps: float, seconds: float, wire: float, y: float) -> None:
        self.steps.append(steps)
        self.seconds.append(seconds)
        self.wire.append(wire)
        self.y.append(y)


@dataclass
class Run:
    """A run.

    Attributes:
        batch: samples of one rank in one step.
        metric, unit: name of the metric, and "%" or "".
        training: the metric on training data, one point per epoch; empty unless it is top-1 accuracy.
        validation: the metric, one point per epoch.
        loss: one point per row.
        setting: of runs that can be compared, the same.
    """

    directory: Path
    label: str
    ranks: int
    batch: int
    seconds_per_step: float
    metric: str
    unit: str
    training: Curve
    validation: Curve
    loss: Curve
    setting: dict[str, Any]

    @property
    def samples_per_second(self) -> float:
        """NaN if the seconds are unknown."""
        return self.ranks * self.batch / self.seconds_per_step if self.seconds_per_step > 0 else math.nan

    @property
    def is_top1(self) -> bool:
        """Whether the metric is top-1 accuracy."""
        return self.metric == UNKNOWN or (self.unit == "%" and self.metric.endswith("top1"))


def mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else float("nan")


def setting_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What runs must have in common to be compared. Empty if this is not known."""
    if not config:
        return {}
    return {"dataset": config.get("dataset"), "model": config.get("model"), "metric": metric_of(config, {})}


def algorithm(config: Mapping[str, Any], directory: Path) -> str:
    """The name of the algorithm, from train.local, train.gossip or train.compression."""
    train = config.get("train") or {}
    for key in ("local", "gossip", "compression"):
        if (node := train.get(key)) and "_target_" in node:
            return _name(node)
    raise PlotError(f"{directory}/config.yaml has no algorithm; give the run a label: LABEL={directory}")


def _name(node: Any) -> str:
    if not isinstance(node, Mapping) or "_target_" not in node:
        return "?"
    name = str(node["_target_"]).rpartition(".")[2]
    if name not in ("OuterSteps", "Periodic"):  # the second: runs before compressed outer steps
        return NAMES.get(name, name.removesuffix("Compressor"))
    # exchanges over all ranks every so many steps; between them another algorithm, or every rank alone
    base, outer, compression = node.get("base"), node.get("outer"), node.get("compression")
    label = (_name(base) if base else "local SGD") + (f" + {_name(outer)}" if outer else " + PGA" if base else "")
    return label + (f" + {_name(compression)}" if compression else "")


def check_comparable(runs: Iterable[Run]) -> None:
    """Raises PlotError if two runs differ in model, data or metric, since their curves cannot be compared."""
    known = [run for run in runs if run.setting]
    for run in known[1:]:
        for key, value in run.setting.items():
            if value != known[0].setting[key]:
                raise PlotError(
                    f"these runs cannot be compared: {key} is\n  {known[0].setting[key]} in {known[0].directory}\n"
                    f"  {value} in {run.directory}\nPlot them separately."
                )
