"""Rank r sends to r + 1, r + 2, r + 4, ... in every round."""

from dgc.gossip import static_exponential
from dgc_training.config import Config, configs

configs.train.gossip.graph = Config(static_exponential, _partial_=True)
