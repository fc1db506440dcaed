"""To ranks + 1, + 2, + 4 .. in every round."""

from dgc.gossip import static_exponential
from dgc_training.config import Config, configs

configs.train.gossip.graph = Config(static_exponential, _partial_=True)
