"""AD-PSGD (Lian et al. 2018, arXiv 1710.06952): ranks train asynchronously and average in pairs."""

from dgc.gossip import ADPSGD, bipartite_complete
from dgc_training.config import Config, configs

configs.train.gossip = Config(ADPSGD)
configs.train.gossip.graph = Config(bipartite_complete, _partial_=True)  # or a file of configs/topology with pairs
configs.train.gossip.averagings_per_step = 1.0  # that a rank starts at most; null: as many as the network allows
configs.train.gossip.timeout = 300  # seconds of silence after which a rank counts as lost
