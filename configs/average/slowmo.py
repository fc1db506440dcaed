"""SlowMo (Wang et al. 2020, arXiv 1910.00643) over the gossip stacked before it, or over local SGD."""

from dgc.outer import OuterSteps, SlowMo
from dgc_training.config import Config, configs

configs.train.gossip = Config(OuterSteps, average_every=48, base=configs.train.gossip)
configs.train.gossip.outer = Config(SlowMo, beta=0.5, alpha=1.0)
