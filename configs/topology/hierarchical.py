"""Each rank sends in turn to all ranks of its machine and to one rank of another machine."""

from dgc.gossip import hierarchical
from dgc_training.config import Config, configs

configs.train.gossip.graph = Config(hierarchical, _partial_=True, local_size=8)
