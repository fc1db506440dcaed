"""Both neighbours on a ring, always; peers=1: the next one only."""

from dgc.gossip import ring
from dgc_training.config import Config, configs

configs.train.gossip.graph = Config(ring, _partial_=True, peers=2)
