"""Each rank to ranks + j (m+1)^i: the exact mean after log n rounds where n is a power of m + 1."""

from dgc.gossip import n_peer_exponential
from dgc_training.config import Config, configs

configs.train.gossip.graph = Config(n_peer_exponential, _partial_=True, peers=1)
