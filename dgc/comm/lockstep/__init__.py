"""N simulated ranks in one process."""

from dgc.comm.lockstep.world import LockstepError as LockstepError
from dgc.comm.lockstep.world import LockstepTransport as LockstepTransport
from dgc.comm.lockstep.world import LockstepWorld as LockstepWorld
