"""The names of the package itself, which are loaded when they are used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dgc
import dgc.fsdp
import dgc.optim


def test_every_name_is_loaded_and_is_that_of_its_package_and_the_one_of_type_checkers() -> None:
    assert 20 <= len(dgc._PACKAGE_OF) <= 30
    for name, package in dgc._PACKAGE_OF.items():
        assert getattr(dgc, name) is getattr(sys.modules[package], name)
        assert name in dir(dgc)
    with pytest.raises(AttributeError, match="module 'dgc' has no attribute 'DGCCompresor'"):
        _ = dgc.DGCCompresor
    tree = ast.parse(Path(dgc.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen == {**dgc._PACKAGE_OF, "Transport": "dgc.comm.transport"}
    # an earlier name says the present one
    for module, old, new in (
        (dgc, "GossipOptimizer", "dgc.LocalOptimizer"),
        (dgc, "outer", "dgc.local"),
        (dgc.optim, "GossipOptimizer", "dgc.optim.LocalOptimizer"),
        (dgc.fsdp, "ShardedGossipOptimizer", "dgc.fsdp.ShardedLocalOptimizer"),
    ):
        with pytest.raises(AttributeError, match=f"{old} is now {new}$"):
            getattr(module, old)


def test_the_package_loads_nothing_until_a_name_is_used() -> None:
    """And no name loads what only some programs use and is slow to import."""
    code = """
import sys, dgc
print(sorted(m for m in sys.modules if m.startswith('dgc.') or m == 'torch'))
assert all(getattr(dgc, name) for name in dgc._PACKAGE_OF)
print(sorted({'horovod', 'mpi4py', 'scipy', 'torch._dynamo'} & {*sys.modules}))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split("\n") == ["[]", "[]", ""]
