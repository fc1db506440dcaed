"""Backends of kernels that do not run on a CPU: a method asks for the backend of its bucket's device alone.

Tensors on the device "meta" stand for tensors of a GPU. They have no values, so a step ends where it reads one.
"""

from contextlib import suppress
from typing import Any

import pytest
import torch
from kernels.interpreter import interpreter as interpreter
from laws.table import TABLE

from dgc import compression, kernels
from dgc.comm.requests import next_requests
from dgc.core.bucket import Bucket, lay_out
from dgc.engine.state import BucketStates
from dgc.kernels.launch import Launcher

META = torch.device("meta")


def ef21_powersgd() -> Any:
    return compression.EF21Compressor(compression.PowerSGDCompressor(2, min_compression_rate=0))


MAKERS = {**{row.name: row.make for row in TABLE}, "ef21-powersgd": ef21_powersgd}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The types of the devices whose kernels are asked for, none of which does anything."""
    found: list[str] = []

    def noted(name: str, device: torch.device) -> Any:
        found.append(device.type)
        return backend(name, META)

    backend = kernels._backend
    monkeypatch.setattr(kernels, "_asked", "triton")
    monkeypatch.setattr(kernels, "_backend", noted)
    monkeypatch.setattr(Launcher, "__call__", lambda *arguments: None)
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_no_method_asks_for_kernels_of_a_cpu_if_its_bucket_is_on_a_gpu(name: str, asked: list[str]) -> None:
    tensors = [("a", torch.empty(12, 20, device=META)), ("b", torch.empty(7, device=META))]
    bucket = Bucket("bucket", lay_out(tensors), torch.float32, META)
    states = BucketStates(MAKERS[name]())
    with suppress(RuntimeError):  # what has no values cannot be read; NotImplementedError is one
        states.add(bucket, 2, 0)
        next_requests(states.reduce(bucket))
    assert "cpu" not in asked
