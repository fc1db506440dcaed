"""Checks that all ranks run the same code with the same config on the same type of device. Compares configs."""

import hashlib
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import DictConfig

import dgc.comm
import dgc_training
from dgc.comm import Transport, all_gather_object
from dgc_training.config import to_yaml
from dgc_training.faults.failure import UsageError

ROOT = Path(dgc_training.__path__[0]).parent
FOLDERS = (ROOT / "dgc_datasets", ROOT / "dgc_models", ROOT / "dgc_training", Path(dgc.comm.__path__[0]).parent)


def code_hashes() -> dict[str, str]:
    """A short hash of every Python file of the trainer and of dgc, by its relative path."""
    files = {"train.py": ROOT / "train.py"}
    for folder in FOLDERS:
        files |= {f"{folder.name}/{path.relative_to(folder).as_posix()}": path for path in folder.rglob("*.py")}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for name, path in sorted(files.items())
        if path.exists()
    }


def code_difference(here: dict[str, str], there: dict[str, str]) -> str | None:
    """The first file that differs between two ranks; None if they run the same code."""
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            missing = "" if name in here and name in there else " (one of them has no such file)"
            return name + missing
    return None


def check_agreement(tree: DictConfig, device: torch.device, transport: Transport) -> None:
    """Raises UsageError, with the first rank that differs from rank 0 in code, config or device type."""
    own = (to_yaml(tree, resolve=True), device.type, code_hashes())
    config, device_type, hashes = (gathered := all_gather_object(transport, own, name="agreement"))[0]
    for rank, (other_config, other_type, other_hashes) in enumerate(gathered):
        if (file := code_difference(hashes, other_hashes)) is not None:
            raise UsageError(
                f"rank {rank} runs other code than rank 0: {file} differs. "
                "Every machine needs the same version of the repository."
            )
        if other_type != device_type:
            raise UsageError(
                f"rank 0 uses the {device_type}, rank {rank} the {other_type}. Set --devices for all ranks."
            )
        if other_config != config:
            lines = config_differences(config, other_config) or ["  (settings that do not change the training)"]
            raise UsageError(f"rank {rank} has another config than rank 0 (0 -> {rank}):\n" + "\n".join(lines))


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
