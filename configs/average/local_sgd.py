"""Local SGD (Stich 2019, arXiv 1805.09767): ranks train alone and average every 8 steps."""

from dgc.outer import OuterSteps
from dgc_training.config import Config, configs

configs.train.gossip = Config(OuterSteps, average_every=8, base=None, outer=None)
