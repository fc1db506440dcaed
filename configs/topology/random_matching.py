"""Random pairs of ranks, drawn in each round."""

from dgc.gossip import random_matching
from dgc_training.config import Config, configs

configs.train.gossip.graph = Config(random_matching, _partial_=True, seed=0, rounds=256)
