"""Compares two configs key by key."""

from typing import Any

import yaml

# Keys that may change when a run is resumed, since they do not affect the training result.
FREE_KEYS = (
    "data.num_threads_per_worker",
    "data.num_workers",
    "train.bucket_mb",
    "train.kernels",
    "train.transport",
    "train.timeout",
    "train.log_every",
    "train.checkpoint_every",
    "train.check_replicas_every",
    "train.trace",
    "train.recorder",
    "train.recorder._target_",
)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings, by dotted key. Lists are leaves."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return leaves


def config_differences(old: str, new: str) -> list[str]:
    """Lines 'key: old -> new' for the differences of two resolved configs (YAML), without FREE_KEYS."""
    before, after = flatten(yaml.safe_load(old) or {}), flatten(yaml.safe_load(new) or {})
    lines = []
    for key in sorted(before.keys() | after.keys()):
        values = [repr(side[key]) if key in side else "(absent)" for side in (before, after)]
        if values[0] != values[1] and key not in FREE_KEYS:
            lines.append(f"  {key}: {values[0]} -> {values[1]}")
    return lines
