"""SlowMo (Wang et al. 2020, arXiv 1910.00643) over gossip or, without a file of configs/gossip, over local SGD."""

from dgc.local import SlowMo
from dgc_training.config import Config, configs

configs.train.local.average_every = 48
configs.train.local.outer = Config(SlowMo, beta=0.5, alpha=1.0)
