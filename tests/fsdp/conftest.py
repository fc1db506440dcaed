"""FSDP2 on one machine of one rank, in one process."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from dgc.comm.torch_distributed import connect
from dgc.comm.transport import Transport


@pytest.fixture(scope="module")
def transport() -> Iterator[Transport]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield connect(hierarchical=True)
    dist.destroy_process_group()
