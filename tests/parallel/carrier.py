"""The transport of a worker, by its launcher."""

import os
from typing import Any


def new_transport(**options: Any) -> Any:
    """torch.distributed under torchrun, otherwise Horovod."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from dgc.comm.torch_distributed import connect
    else:
        from dgc.comm.horovod import connect
    return connect(**options)
