"""Odd and even ranks in pairs, exponentially far apart; needs an even number of ranks."""

from dgc.gossip import bipartite_exponential
from dgc_training.config import Config, configs

configs.train.gossip.graph = Config(bipartite_exponential, _partial_=True, peers=1, order="paper")
