"""Methods outside the core: one file each, in plain PyTorch, against the same interface as methods of users.

They keep the invariants of `dgc.testing` and have no kernels of their own. The docstring of each file names its
paper.
"""

from dgc.contrib.accordion import AccordionCompressor as AccordionCompressor
from dgc.contrib.choco import CHOCO as CHOCO
from dgc.contrib.choco import Sign as Sign
from dgc.contrib.choco import TopK as TopK
from dgc.contrib.double_squeeze import DoubleSqueezeCompressor as DoubleSqueezeCompressor
from dgc.contrib.gtopk import GTopKCompressor as GTopKCompressor
from dgc.contrib.natural import NaturalCompressor as NaturalCompressor
from dgc.contrib.onebit import OneBitCompressor as OneBitCompressor
from dgc.contrib.powergossip import PowerGossip as PowerGossip
from dgc.contrib.random_k import RandomBlockCompressor as RandomBlockCompressor
from dgc.contrib.random_k import RandomKCompressor as RandomKCompressor
from dgc.contrib.svd import AtomoCompressor as AtomoCompressor
from dgc.contrib.svd import SVDCompressor as SVDCompressor
from dgc.contrib.terngrad import TernGradCompressor as TernGradCompressor
from dgc.contrib.zero_one_adam import ZeroOneAdam as ZeroOneAdam
from dgc.contrib.zero_one_adam import ZeroOneSteps as ZeroOneSteps
