"""Published algorithms as their papers write them: the definitions that the fast implementations are held to."""

from dgc.paper.dgc import DGC as DGC
from dgc.paper.ldte_bs import LDTEBS as LDTEBS
from dgc.paper.threshold import Threshold as Threshold
