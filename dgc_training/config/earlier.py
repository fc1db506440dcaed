"""Configs that an earlier version has saved. Local steps were a kind of gossip there: `train.gossip` had them.

train.gossip: {_target_: dgc.outer.OuterSteps, base: BASE, ..}      earlier
train.local:  {_target_: dgc.local.OuterSteps, base: ${train.gossip}, ..}, and BASE as train.gossip
"""

from collections.abc import Callable
from typing import Any

from dgc_training.config.tree import leaves

OUTER, LOCAL, GOSSIP = "dgc.outer.", "dgc.local.", "dgc.gossip."
# earlier names in dgc.gossip
RENAMED = {
    "Periodic": "local.OuterSteps",
    "SlowMo": "local.SlowMo",
    "Nesterov": "local.Nesterov",
    "Machines": "gossip.HierarchicalGossip",
    "Exact": "gossip.FP32Message",
    "Half": "gossip.HalfPrecisionMessage",
    "Int8": "gossip.Int8Message",
    "given": "gossip.mixing_from_weights",
}


def converted(content: dict[Any, Any]) -> dict[Any, Any]:
    """The content of a saved config with the present keys and classes. One that has them already is unchanged."""
    train = content.get("train")
    if not isinstance(train, dict) or "gossip" not in train or "local" in train:
        return content
    content = _with_texts(content, _class)
    train = content["train"]
    if (steps := _local_steps(train["gossip"])) is None:
        train["local"] = None
        return content
    train["local"], train["gossip"] = train["gossip"], steps.get("base")
    content = _with_texts(content, lambda text: text.replace("train.gossip.", "train.local."))
    if "base" in steps:
        _local_steps(content["train"]["local"])["base"] = "${train.gossip}"
    requires = content.get("requires") or {}
    if "train.local._target_" in requires:  # of 0/1 Adam, whose ranks train alone between exchanges
        requires["train.gossip"] = None
    return content


def key_now(key: str, tree: dict[str, Any]) -> str | None:
    """The present key of local steps, if `key` is the earlier one: train.gossip.delay for train.local.delay."""
    section, _, rest = key.partition("train.gossip.")
    keys = {name for name, _ in leaves(tree)}
    is_earlier = not section and rest and f"train.local.{rest}" in keys and key not in keys
    return f"train.local.{rest}" if is_earlier else None


def _local_steps(node: Any) -> Any:
    """The node of local steps, which may be the base of gossip between machines. None if there is none."""
    while isinstance(node, dict):
        target = str(node.get("_target_"))
        if target.startswith(LOCAL):
            return node
        node = node.get("base") if target == f"{GOSSIP}HierarchicalGossip" else None
    return None


def _class(text: str) -> str:
    if text.startswith(OUTER):
        return LOCAL + text.removeprefix(OUTER)
    name = RENAMED.get(text.removeprefix(GOSSIP)) if text.startswith(GOSSIP) else None
    return text if name is None else f"dgc.{name}"


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy in which each text is changed, keys included."""
    if isinstance(value, dict):
        return {_with_texts(key, change): _with_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value
