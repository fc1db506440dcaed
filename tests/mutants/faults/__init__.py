"""The faults by room."""

from ..fault import Fault
from .comm import COMM
from .compression import COMPRESSION
from .data import DATA
from .ddp import DDP
from .fsdp import FSDP
from .gossip import GOSSIP
from .kernels import KERNELS
from .memory import MEMORY
from .native import NATIVE
from .optim import OPTIM
from .selection import SELECTION
from .training import TRAINING
from .translation import TRANSLATION
from .wire import WIRE

FAULTS: tuple[Fault, ...] = (
    *KERNELS,
    *NATIVE,
    *WIRE,
    *SELECTION,
    *MEMORY,
    *COMPRESSION,
    *GOSSIP,
    *COMM,
    *OPTIM,
    *FSDP,
    *DDP,
    *TRAINING,
    *DATA,
    *TRANSLATION,
)
assert len({fault.name for fault in FAULTS}) == len(FAULTS), "names are unique"
