"""Ranks form a rectangular grid; each rank sends to its neighbours."""

from dgc.gossip import grid
from dgc_training.config import Config, configs

configs.train.gossip.graph = Config(grid, _partial_=True)
