"""The neighbours on a rectangle."""

from dgc.gossip import grid
from dgc_training.config import Config, configs

configs.train.gossip.graph = Config(grid, _partial_=True)
