"""FSDP2 for the tests of several adapters: with a torch that dgc.fsdp refuses, those that shard are skipped."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dgc.versions import minor_version

OLDEST = "2.13"  # tests/test_names.py has the refusal of older ones


def skip(*_: Any, **__: Any) -> None:
    pytest.skip(f"dgc.fsdp needs torch {OLDEST}")


if TYPE_CHECKING or minor_version(torch.__version__) >= minor_version(OLDEST):
    from torch.distributed.fsdp import fully_shard as fully_shard

    from dgc import fsdp as fsdp
else:
    fully_shard, fsdp = skip, SimpleNamespace(compress=skip, quantize=skip, local_mesh=skip)
