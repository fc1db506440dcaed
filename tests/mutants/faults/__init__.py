"""The faults by room."""

from tests.mutants.fault import Fault
from tests.mutants.faults.comm import COMM
from tests.mutants.faults.compression import COMPRESSION
from tests.mutants.faults.data import DATA
from tests.mutants.faults.gossip import GOSSIP
from tests.mutants.faults.kernels import KERNELS
from tests.mutants.faults.memory import MEMORY
from tests.mutants.faults.native import NATIVE
from tests.mutants.faults.optim import OPTIM
from tests.mutants.faults.selection import SELECTION
from tests.mutants.faults.training import TRAINING
from tests.mutants.faults.wire import WIRE

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
    *TRAINING,
    *DATA,
)
assert len({fault.name for fault in FAULTS}) == len(FAULTS), "names are unique"
