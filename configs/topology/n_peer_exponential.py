"""Rank r sends to r + j (m+1)^i. The mean is exact after log n rounds if n is a power of m + 1."""

from dgc.gossip import n_peer_exponential
from dgc_training.config import Config, configs

configs.train.gossip.graph = Config(n_peer_exponential, _partial_=True, peers=1)
