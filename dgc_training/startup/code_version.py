"""Compares the code of the ranks. Ranks with equal configs but different code would train differently."""

import hashlib
from pathlib import Path

import dgc.comm
import dgc_training

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
