"""The faults by room."""

from ..fault import Fault
from .comm import COMM
from .compression import COMPRESSION
from .data import DATA
from .ddp import DDP
from .fsdp import FSDP
from .gossip import GOSSIP
from .kernels import KERNELS
from .local import LOCAL
from .memory import MEMORY
from .native import NATIVE
from .optim import OPTIM
from .selection import SELECTION
from .tools import TOOLS
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
    *LOCAL,
    *FSDP,
    *DDP,
    *TRAINING,
    *DATA,
    *TOOLS,
    *TRANSLATION,
)
assert len({fault.name for fault in FAULTS}) == len(FAULTS), "names are unique"
