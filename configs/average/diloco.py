"""DiLoCo (Douillard et al. 2023, arXiv 2311.08105): an outer step of Nesterov's momentum every 50 steps."""

from dgc.gossip import Nesterov, Periodic
from dgc_training.config import Config, configs

configs.train.gossip = Config(Periodic, average_every=50, base=None)
configs.train.gossip.outer = Config(Nesterov, outer_lr=0.7, momentum=0.9)
