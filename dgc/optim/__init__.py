"""The distributed optimizer, and DGC's SGD."""

from dgc.engine.redistribute import redistribute as redistribute
from dgc.engine.state import ResidualPart as ResidualPart
from dgc.optim.broadcast import broadcast_optimizer_state as broadcast_optimizer_state
from dgc.optim.broadcast import broadcast_parameters as broadcast_parameters
from dgc.optim.dgc_adam import DGCAdam as DGCAdam
from dgc.optim.distributed import DistributedOptimizer as DistributedOptimizer
from dgc.optim.local import LocalOptimizer as LocalOptimizer
from dgc.optim.muon import MuonWithAdamW as MuonWithAdamW
from dgc.optim.muon_rule import MuonGroups as MuonGroups
from dgc.optim.muon_rule import muon_groups as muon_groups
from dgc.optim.onebit_adam import OneBitAdam as OneBitAdam
from dgc.optim.sgd import DGCSGD as DGCSGD
from dgc.optim.wrapper import Wrapper as Wrapper
