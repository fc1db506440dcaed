"""Pairs of an odd and an even rank, all of them in turn. Needs an even number of ranks."""

from dgc.gossip import bipartite_linear
from dgc_training.config import Config, configs

configs.train.gossip.graph = Config(bipartite_linear, _partial_=True, peers=1, order="paper")
