"""Published algorithms as their papers write them: the definitions that the fast implementations are held to."""

from dgc.paper.choco import choco_sgd as choco_sgd
from dgc.paper.dgc import DGC as DGC
from dgc.paper.ef21 import EF21 as EF21
from dgc.paper.ldte_bs import LDTEBS as LDTEBS
from dgc.paper.onebit_adam import onebit_adam as onebit_adam
from dgc.paper.powersgd import PowerSGD as PowerSGD
from dgc.paper.sgp import osgp as osgp
from dgc.paper.sgp import sgp as sgp
from dgc.paper.threshold import Threshold as Threshold
from dgc.paper.two_phase import SixteenBits as SixteenBits
from dgc.paper.two_phase import TwoPhase as TwoPhase
from dgc.paper.zero_one_adam import zero_one_adam as zero_one_adam
