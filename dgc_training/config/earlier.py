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

from dgc_training.config.tree import leaves

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
    content = _replaced(content, {rf"\bdgc\.{name}": f"dgc.{now}" for name, now in RENAMED.items()})
    train = content["train"]
    steps = train["gossip"]
    while isinstance(steps, dict) and str(steps.get("_target_")).endswith(".HierarchicalGossip"):
        steps = steps.get("base")
    if not isinstance(steps, dict) or not str(steps.get("_target_")).startswith("dgc.local."):
        train["local"] = None
        return content
    train["local"], gossip = train.pop("gossip"), steps.get("base")
    steps |= {"base": "${train.gossip}"} if "base" in steps else {}
    content = _replaced(content, {r"\btrain\.gossip\.": "train.local."})
    content["train"]["gossip"] = gossip
    requires = content.get("requires") or {}
    if "train.local._target_" in requires:  # of 0/1 Adam, whose ranks train alone between exchanges
        requires["train.gossip"] = None
    return content


def _replaced(content: dict[Any, Any], names: dict[str, str]) -> Any:
    text = yaml.safe_dump(content, width=math.inf, sort_keys=False)
    for name, now in names.items():
        text = re.sub(name, now, text)
    return yaml.safe_load(text)


def key_now(key: str, tree: dict[str, Any]) -> str | None:
    """The present key of local steps, if `key` is the earlier one: train.gossip.delay for train.local.delay."""
    known, now = dict(leaves(tree)), re.sub(r"^train\.gossip\.", "train.local.", key)
    return now if now in known and key not in known else None
