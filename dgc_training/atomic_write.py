"""Writes files atomically, see dgc.atomic_write."""

import json
from pathlib import Path
from typing import Any

from dgc.atomic_write import write_atomically as write_atomically


def write_json(path: Path, content: Any) -> None:
    """Atomically replaces the file `path` with `content` as JSON."""
    write_atomically(path, lambda file: file.write((json.dumps(content, indent=2) + "\n").encode()))
