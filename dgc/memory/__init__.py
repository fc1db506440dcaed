"""Error feedback: elements that were not sent are kept and added to later gradients."""

from dgc.memory.clip import ClipByGlobalNorm as ClipByGlobalNorm
from dgc.memory.clip import ClipByNorm as ClipByNorm
from dgc.memory.clip import ClipByValue as ClipByValue
from dgc.memory.clip import Clipping as Clipping
from dgc.memory.clip import ClipValueByGlobalNorm as ClipValueByGlobalNorm
from dgc.memory.momentum import DGCSGDMemory as DGCSGDMemory
from dgc.memory.protocol import Memory as Memory
from dgc.memory.protocol import MomentumCorrection as MomentumCorrection
from dgc.memory.residual import NoMemory as NoMemory
from dgc.memory.residual import ResidualMemory as ResidualMemory
