"""Pairs of an odd and an even rank, at exponential distances. Needs an even number of ranks."""

from dgc.gossip import bipartite_exponential
from dgc_training.config import Config, configs

configs.train.gossip.graph = Config(bipartite_exponential, _partial_=True, peers=1, order="paper")
