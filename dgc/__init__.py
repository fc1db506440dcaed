"""Gradient compression and gossip for distributed training over slow networks.

The rooms, from the ground up (an import only ever points down): `kernels`, `comm`, `wire`, `selection`,
`memory`, `compression`, `optim`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dgc.comm.transport import Transport

__version__ = "0.1.0"


def init() -> "Transport":
    """Start Horovod, in place of `hvd.init()`, and return the transport that optimizers use by default.

    First the environment is set so that runs repeat exactly (HOROVOD_FUSION_THRESHOLD, HOROVOD_CYCLE_TIME); values
    that are set already are kept. Where Horovod runs already, it stays as it is. Further calls return the same
    transport. Raises ModuleNotFoundError where Horovod is not installed.
    """
    from dgc.optim.broadcast import default_transport

    return default_transport()
