"""Imports only point down: DESIGN's rooms, checked on the source without running it.

A room is a folder or file of the repository. Each may import itself and the rooms named for it, by
absolute or relative import, at the top of a file or inside a function.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

CORE = ("dgc.bucket", "dgc.kernels", "dgc.comm", "dgc.wire", "dgc.selection", "dgc.memory")
LIBRARY = (*CORE, "dgc.compression", "dgc.gossip", "dgc.optim")
PROTOCOLS = ("dgc.compression.protocol", "dgc.compression.route", "dgc.compression.dense")

# room -> what it may import from this repository besides itself, from the ground up
ALLOWED: dict[str, tuple[str, ...]] = {
    "dgc/bucket.py": (),
    "dgc/kernels": ("dgc.bucket",),
    "dgc/comm": ("dgc.bucket", "dgc.kernels"),
    "dgc/wire": CORE[:3],
    "dgc/selection": CORE[:4],
    "dgc/memory": CORE[:5],
    "dgc/compression": CORE,
    "dgc/gossip": CORE,
    # the definitions: nothing of what they define, and nothing in dgc imports them
    "dgc/optim": (*CORE, *PROTOCOLS, "dgc.gossip"),
    "dgc/paper": (
        "dgc.bucket",
        "dgc.comm.requests",
        *PROTOCOLS,
        "dgc.compression.finite",
        "dgc.gossip.topology.mixing",
        "dgc.gossip.topology.topology",
    ),
    "dgc/testing.py": ("dgc.bucket", "dgc.comm", "dgc.compression.protocol"),
    "dgc/__init__.py": LIBRARY,
    "dgc_datasets": (),
    "dgc_models": (),
    "dgc_training": ("dgc.kernels", "dgc.comm", "dgc.optim", "dgc_datasets.torchvision_compat"),
    "train.py": ("dgc.comm", "dgc.optim", "dgc_training"),
    "configs": ("dgc", "dgc_datasets", "dgc_models", "dgc_training"),
    "examples": ("dgc",),
    "benchmarks": ("dgc", "dgc_datasets", "dgc_models", "dgc_training", "train", "configs", "scripts"),
    "scripts": ("dgc", "dgc_datasets", "dgc_models", "dgc_training", "configs", "benchmarks"),
}
OURS = {
    *("dgc", "dgc_datasets", "dgc_models", "dgc_training", "train", "configs"),
    *("benchmarks", "scripts", "examples", "tests"),
}

# third-party packages that only these files may import
ONLY_IN: dict[str, tuple[str, ...]] = {
    "horovod": ("dgc/comm/horovod.py", "examples"),
    "mpi4py": ("dgc/comm/mpi/runtime.py",),
}
# rooms that import nothing outside the standard library but these
OUTSIDE: dict[str, tuple[str, ...]] = {
    "dgc": ("torch", "numpy", "jaxtyping", "horovod", "mpi4py", "triton"),
    "dgc_datasets": ("torch", "torchvision", "numpy", "sklearn", "PIL"),
    "dgc_models": ("torch", "torchvision", "numpy"),
}


def imports(source: str, path: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a file imports; relative imports are made absolute.

    `from a import b` gives `a.b`: whether b is a module or a name in one, it lies under `a`.
    """
    package = path.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, base if alias.name == "*" else f"{base}.{alias.name}"


def under(name: str, parents: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of `parents` or lies below one."""
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


def room_of(path: str, rooms: Iterable[str]) -> str | None:
    """The room a file lies in; None where it lies in none of them."""
    return next((room for room in rooms if path == room or path.startswith(room + "/")), None)


def violations(source: str, path: str) -> list[str]:
    """Every import of the file that points up, sideways or outside, one line each."""
    room = room_of(path, ALLOWED)
    if room is None:
        return [f"{path}: belongs to no room that the layering test knows"]
    itself = room.removesuffix(".py").replace("/", ".")
    wrong = []
    for line, name in imports(source, path):
        top = name.split(".")[0]
        if top in OURS:
            if not under(name, (itself, *ALLOWED[room])):
                wrong.append(f"{path}:{line}: {room} may not import {name}")
            continue
        if top in ONLY_IN and room_of(path, ONLY_IN[top]) is None:
            wrong.append(f"{path}:{line}: only {', '.join(ONLY_IN[top])} may import {top}")
        closed = room_of(path, OUTSIDE)
        if closed and top not in sys.stdlib_module_names and top not in OUTSIDE[closed]:
            wrong.append(f"{path}:{line}: {closed} may not import {top}")
    return wrong


def sources() -> list[str]:
    """Every Python file of the rooms, by its path from the root."""
    tops = sorted({room.split("/")[0] for room in ALLOWED})
    files = [file for top in tops for file in [ROOT / top, *(ROOT / top).rglob("*.py")] if file.is_file()]
    return [str(file.relative_to(ROOT)) for file in files]


def test_imports_point_down() -> None:
    files = sources()
    assert any(path.startswith("dgc/") for path in files)
    wrong = [line for path in files for line in violations((ROOT / path).read_text(), path)]
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_folder_of_code_is_a_room() -> None:
    found = {path.parent.name for path in ROOT.glob("[!.]*/*.py")} - {"build"}
    assert found <= OURS, f"no room, so unchecked: {sorted(found - OURS)}"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("dgc/wire/values.py", "from dgc.selection import exact"),
        ("dgc/wire/values.py", "from ..selection import exact"),
        ("dgc/comm/lockstep/world.py", "import dgc.optim"),
        ("dgc/comm/lockstep/world.py", "def late():\n    from dgc import compression"),
        ("dgc/bucket.py", "from .kernels import reference"),
        ("dgc/optim/optimizer.py", "from dgc.compression.sparse.dgc import DGCCompressor"),
        ("dgc/optim/optimizer.py", "from dgc.compression import DGCCompressor"),
        ("dgc/compression/sparse/dgc.py", "from dgc.gossip import topology"),
        ("dgc/compression/sparse/dgc.py", "import horovod.torch as hvd"),
        ("dgc/gossip/pushsum/sgp.py", "from dgc.paper import sgp"),
        ("dgc/paper/choco.py", "from dgc.gossip.difference.operators import TopK"),
        ("dgc/paper/powersgd.py", "import dgc.kernels"),
        ("dgc/comm/lockstep/world.py", "from mpi4py import MPI"),
        ("dgc/paper/dgc.py", "import dgc.kernels as kernels"),
        ("dgc/paper/dgc.py", "from dgc.selection import Exact"),
        ("dgc/paper/dgc.py", "from dgc.memory.protocol import MomentumCorrection"),
        ("dgc/paper/threshold.py", "from dgc.compression import Threshold"),
        ("dgc/paper/threshold.py", "from dgc.compression.quantized.threshold import Threshold"),
        ("dgc/compression/sparse/dgc.py", "from dgc.paper.dgc import DGC"),
        ("dgc/optim/optimizer.py", "from dgc.paper import DGC"),
        ("dgc/__init__.py", "from dgc.paper import DGC"),
        ("dgc/memory/residual.py", "from omegaconf import OmegaConf"),
        ("dgc/memory/residual.py", "import dgc_training.meters"),
        ("dgc_training/loop.py", "from dgc.compression import DGCCompressor"),
        ("dgc_training/loop.py", "import horovod.torch"),
        ("train.py", "from dgc.compression import DGCCompressor"),
        ("train.py", "import dgc_models"),
        ("dgc_training/loop.py", "import dgc_datasets"),
        ("dgc_training/loop.py", "from dgc_datasets import Digits"),
        ("dgc_models/cnn.py", "from dgc.optim import DGCSGD"),
        ("dgc_datasets/digits.py", "import tqdm"),
        ("unknown/room.py", "import os"),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str) -> None:
    assert len(violations(source, path)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("dgc/comm/horovod.py", "import horovod.torch as hvd\nimport torch, os"),
        ("dgc/comm/mpi/runtime.py", "from mpi4py import MPI"),
        ("dgc/wire/values.py", "from . import indices\nfrom dgc.comm.requests import AllGather\nimport math"),
        ("dgc/optim/optimizer.py", "from dgc.compression.protocol import Compression"),
        ("dgc/paper/dgc.py", "from dgc.compression.protocol import MomentumCorrection, Result"),
        ("dgc/kernels/selection/triton.py", "import triton.language as tl"),
        ("dgc_datasets/digits.py", "from sklearn.datasets import load_digits\nimport torchvision"),
        ("dgc_training/constructors.py", "import dgc_datasets.torchvision_compat"),
        ("train.py", "from dgc_training.config import load\nfrom dgc.comm.horovod import HorovodTransport"),
        ("configs/dgc/__init__.py", "from dgc.compression import DGCCompressor\nimport torch"),
    ],
)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    assert violations(source, path) == []
