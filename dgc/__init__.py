"""Gradient compression and gossip for distributed training over slow networks.

    import torch
    from torch.nn.parallel import DistributedDataParallel
    from dgc import TwoPhaseCompressor, compress

    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)  # or any other
    exchange = compress(model, TwoPhaseCompressor(bits=8), optimizer)

8 bits send 4 times fewer bytes than fp32. For SGD with momentum, `DGCCompressor` and the optimizer `DGCSGD` send
fewer.

The names of the list below are loaded when they are first used. All others are imported from the packages, which
are, from the ground up (an import only ever points down): `kernels`, `comm`, `core`, the families of methods
`sparse`, `lowrank` and `codes`, whose classes `compression` and `memory` name, `engine`, `gossip`, and the
adapters `optim`, `ddp`, `fsdp`, `aggregate`, `local`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dgc.comm.transport import Transport
    from dgc.compression import BF16Compressor as BF16Compressor
    from dgc.compression import DenseCompressor as DenseCompressor
    from dgc.compression import DGCCompressor as DGCCompressor
    from dgc.compression import FP16Compressor as FP16Compressor
    from dgc.compression import PowerSGDCompressor as PowerSGDCompressor
    from dgc.compression import QSGDCompressor as QSGDCompressor
    from dgc.compression import Route as Route
    from dgc.compression import Rule as Rule
    from dgc.compression import ScaledSignCompressor as ScaledSignCompressor
    from dgc.compression import SparseCompressor as SparseCompressor
    from dgc.compression import ThresholdCompressor as ThresholdCompressor
    from dgc.compression import TwoPhaseCompressor as TwoPhaseCompressor
    from dgc.ddp import compress as compress
    from dgc.gossip import ADPSGD as ADPSGD
    from dgc.gossip import OSGP as OSGP
    from dgc.gossip import SGP as SGP
    from dgc.local import Nesterov as Nesterov
    from dgc.local import OuterSteps as OuterSteps
    from dgc.memory import DGCSGDMemory as DGCSGDMemory
    from dgc.memory import ResidualMemory as ResidualMemory
    from dgc.optim import DGCSGD as DGCSGD
    from dgc.optim import DistributedOptimizer as DistributedOptimizer
    from dgc.optim import LocalOptimizer as LocalOptimizer
    from dgc.optim import MuonWithAdamW as MuonWithAdamW
    from dgc.optim import OneBitAdam as OneBitAdam
    from dgc.optim import broadcast_optimizer_state as broadcast_optimizer_state
    from dgc.optim import broadcast_parameters as broadcast_parameters
    from dgc.optim import muon_groups as muon_groups
    from dgc.optim import redistribute as redistribute

__version__ = "0.1.0"

_PACKAGES = {
    "dgc.compression": (
        "BF16Compressor DenseCompressor DGCCompressor FP16Compressor PowerSGDCompressor "
        "QSGDCompressor Route Rule ScaledSignCompressor SparseCompressor ThresholdCompressor TwoPhaseCompressor"
    ),
    "dgc.ddp": "compress",
    "dgc.gossip": "ADPSGD OSGP SGP",
    "dgc.memory": "DGCSGDMemory ResidualMemory",
    "dgc.optim": (
        "DGCSGD DistributedOptimizer LocalOptimizer MuonWithAdamW OneBitAdam broadcast_optimizer_state "
        "broadcast_parameters muon_groups redistribute"
    ),
    "dgc.local": "Nesterov OuterSteps",
}
_PACKAGE_OF = {name: package for package, names in _PACKAGES.items() for name in names.split()}
__all__ = ["init", *_PACKAGE_OF]  # a star import loads them


def __getattr__(name: str) -> Any:
    if name not in _PACKAGE_OF:
        raise AttributeError(f"module 'dgc' has no attribute {name!r}")
    return getattr(import_module(_PACKAGE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGE_OF})


def init(transport: str = "auto") -> "Transport":
    """Connect this process with the other ranks, and return the transport that optimizers use by default.

    Call it in place of `hvd.init()`, or of `torch.distributed.init_process_group()`. What is initialised already
    stays as it is. For Horovod, HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME are set first, unless they are set
    already, so that runs repeat exactly. Further calls return the same transport.

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
