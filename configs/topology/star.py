"""One central rank exchanges with all others."""

from dgc.gossip import star
from dgc_training.config import Config, configs

configs.train.gossip.graph = Config(star, _partial_=True, hub=0)
