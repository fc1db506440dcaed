"""Gossip with a global average every 16 steps (Gossip-PGA: Chen et al. 2021, arXiv 2105.09080)."""

from dgc.outer import OuterSteps
from dgc_training.config import Config, configs

configs.train.gossip = Config(OuterSteps, average_every=16, base=configs.train.gossip, outer=None)
