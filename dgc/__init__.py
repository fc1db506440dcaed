"""Gradient compression and gossip for distributed training over slow networks.

The rooms, from the ground up (an import only ever points down): `kernels`, `comm`, `wire`, `selection`,
`memory`, `compression`, `optim`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dgc.comm.transport import Transport

__version__ = "0.1.0"


def init(transport: str = "auto") -> "Transport":
    """Connect this process with the other ranks, and return the transport that optimizers use by default.

    Call it in place of `hvd.init()`, or of `torch.distributed.init_process_group()`. What is initialised already
    stays as it is. For Horovod, the environment is set before it starts so that runs repeat exactly
    (HOROVOD_FUSION_THRESHOLD, HOROVOD_CYCLE_TIME); values that are set already are kept. Further calls return the
    same transport.

    Args:
        transport: "horovod", "torch" (torch.distributed), or "auto": what is initialised already, otherwise
            torch.distributed under torchrun or srun, Horovod under mpirun, horovodrun or PMI, and without a
            launcher Horovod if it is installed. `dgc.comm.connect.choose_transport` returns the choice and its
            reason.

    Raises:
        LaunchError: The transport does not understand the launcher, so each process would train a separate run.
        ModuleNotFoundError: `transport` is "horovod", and Horovod is not installed.
    """
    from dgc.comm.connect import default_transport

    return default_transport(transport=transport)
