"""Which versions of torch the adapters refuse."""

import subprocess
import sys

import pytest
import torch

from dgc.versions import TorchRange

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
