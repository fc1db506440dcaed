"""Rank r sends to r + 2^i and r - 2^i in turn."""

from dgc.gossip import exponential
from dgc_training.config import Config, configs

configs.train.gossip.graph = Config(exponential, _partial_=True, peers=1, order="paper")
