"""Every rank sends to every other rank."""

from dgc.gossip import full
from dgc_training.config import Config, configs

configs.train.gossip.graph = Config(full, _partial_=True)
