"""Both neighbours on a ring, in every round; peers=1: only the next one."""

from dgc.gossip import ring
from dgc_training.config import Config, configs

configs.train.gossip.graph = Config(ring, _partial_=True, peers=2)
