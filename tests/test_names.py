"""The names of dgc, which are loaded when they are used, and the versions of torch that its adapters refuse."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dgc
import dgc.fsdp
import dgc.optim
from dgc.versions import TorchRange


def test_every_name_is_loaded_and_is_that_of_its_package_and_the_one_of_type_checkers() -> None:
    assert 20 <= len(dgc._PACKAGE_OF) <= 30
    for name, package in dgc._PACKAGE_OF.items():
        assert getattr(dgc, name) is getattr(sys.modules[package], name) and name in dir(dgc)
    with pytest.raises(AttributeError, match="module 'dgc' has no attribute 'DGCCompresor'"):
        _ = dgc.DGCCompresor
    (block,) = (node for node in ast.parse(Path(dgc.__file__).read_text()).body if isinstance(node, ast.If))
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
    # the package loads nothing until a name is used, and no name what only some programs use and is slow to import
    code = """
import sys, dgc
print(sorted(m for m in sys.modules if m.startswith('dgc.') or m == 'torch'))
assert all(getattr(dgc, name) for name in dgc._PACKAGE_OF)
print(sorted({'horovod', 'mpi4py', 'scipy', 'torch._dynamo'} & {*sys.modules}))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split("\n") == ["[]", "[]", ""]


WITHOUT_FSDP2 = """
import os, sys, torch
import torch.distributed.fsdp as fsdp
import dgc, dgc.ddp
changes = (
    lambda: fsdp.__dict__.pop("FSDPModule"),
    lambda: delattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params"),
    lambda: setattr(torch, "__version__", "2.9.1+cpu"),
)
for change in changes:
    if os.fork() == 0:  # torch is imported once for all of them
        change()
        try:
            import dgc.fsdp
        except ImportError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the changes are made to a torch that has FSDP2")
def test_fsdp_is_refused_at_its_import_and_ddp_is_not() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_FSDP2], capture_output=True, text=True)
    refusal = "dgc.fsdp works with torch 2.13 to 2.14, and not with torch 2."
    assert [line.startswith(refusal) for line in done.stdout.splitlines()] == [True] * 3, done


def test_a_version_is_older_by_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    supported = TorchRange("ddp", "2.4", "2.14")
    for version in ("2.4.0a0+git", "2.10.1", "2.15.0+cpu", "3.0"):
        monkeypatch.setattr(torch, "__version__", version)
        supported.check_version()
    monkeypatch.setattr(torch, "__version__", "2.3.1")
    with pytest.raises(ImportError, match="dgc.ddp works with torch 2.4 to 2.14, and not with torch 2.3.1"):
        supported.check_version()
    with pytest.raises(ImportError, match=", whose object has no absent"):
        supported.check(object(), ["__class__", "absent"])
