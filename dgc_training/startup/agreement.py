"""Checks that all ranks run the same code, with the same config, on the same type of device."""

import hashlib
from pathlib import Path

import torch
from omegaconf import DictConfig

import dgc.comm
import dgc_training
from dgc.comm import Transport, all_gather_object
from dgc_training.config import to_yaml
from dgc_training.faults.failure import UsageError
from dgc_training.startup.config_differences import config_differences

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
