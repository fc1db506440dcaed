"""DiLoCo (Douillard et al. 2023, arXiv 2311.08105): an outer step of Nesterov's momentum every 50 steps."""

from dgc.local import Nesterov
from dgc_training.config import Config, configs

configs.train.local.average_every = 50
configs.train.local.outer = Config(Nesterov, outer_lr=0.7, momentum=0.9)
