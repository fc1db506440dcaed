"""Rank r sends to r + i and r - i for odd i in turn."""

from dgc.gossip import linear
from dgc_training.config import Config, configs

configs.train.gossip.graph = Config(linear, _partial_=True, peers=1, order="paper")
