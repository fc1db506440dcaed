"""Configs that an earlier version has saved. Local steps were a kind of gossip there.

train.csv: true                                                     earlier
train.recorder: {_target_: scripts.gossip.rank_csv.StepRecorder}

train.gossip: {_target_: dgc.outer.OuterSteps, base: BASE, ..}      earlier
train.local:  {_target_: dgc.local.OuterSteps, base: ${train.gossip}, ..}, and BASE as train.gossip
"""

import math
import re
from typing import Any

import yaml

RECORDER = "{_target_: scripts.gossip.rank_csv.StepRecorder}"
RENAMED = {
    r"outer\.": "local.",
    r"gossip\.Periodic\b": "local.OuterSteps",
    r"gossip\.(SlowMo|Nesterov)\b": r"local.\1",
    r"gossip\.Machines\b": "gossip.HierarchicalGossip",
    r"gossip\.Exact\b": "gossip.FP32Message",
    r"gossip\.Half\b": "gossip.HalfPrecisionMessage",
    r"gossip\.Int8\b": "gossip.Int8Message",
    r"gossip\.given\b": "gossip.mixing_from_weights",
}


def converted(content: dict[Any, Any]) -> dict[Any, Any]:
    """The content of a saved config with the present keys and classes. One that has them already is unchanged."""
    train = content.get("train")
    if isinstance(train, dict) and "csv" in train:
        train["recorder"] = yaml.safe_load(RECORDER) if train.pop("csv") else None
    if not isinstance(train, dict) or "gossip" not in train or "local" in train:
        return content
    text = yaml.safe_dump(content, width=math.inf, sort_keys=False)
    for name, now in RENAMED.items():
        text = re.sub(rf"\bdgc\.{name}", f"dgc.{now}", text)
    content = yaml.safe_load(text)
    if not _local_steps(content):
        content["train"]["local"] = None
        return content
    content = yaml.safe_load(text.replace("train.gossip.", "train.local."))
    train, steps = content["train"], _local_steps(content)
    train["local"], train["gossip"] = train.pop("gossip"), steps.get("base")
    if "base" in steps:
        steps["base"] = "${train.gossip}"
    if "train.local._target_" in (content.get("requires") or {}):
        content["requires"]["train.gossip"] = None  # of 0/1 Adam, whose ranks train alone between exchanges
    return content


def _local_steps(content: dict[Any, Any]) -> dict[Any, Any]:
    """The node of local steps, inside of those of gossip between machines; {} without local steps."""
    steps = content["train"]["gossip"]
    while isinstance(steps, dict) and str(steps.get("_target_")).endswith(".HierarchicalGossip"):
        steps = steps.get("base")
    return steps if isinstance(steps, dict) and str(steps.get("_target_")).startswith("dgc.local.") else {}
