"""The metric of a stored run: whether lower is better, and its unit.

summary.json has the direction. An unfinished run, or one of an earlier version, has the meter in its config. The
metrics of a translation have no meter: their names decide.
"""

import re
from collections.abc import Mapping
from typing import Any

from dgc_training.constructors import import_target

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
