"""D-PSGD (Lian et al. 2017, arXiv 1705.09056): pairs of ranks average, by default."""

from dgc.gossip import DPSGD, bipartite_exponential, uniform
from dgc_training.config import Config, configs

configs.train.gossip = Config(DPSGD)
configs.train.gossip.graph = Config(bipartite_exponential, _partial_=True, peers=1, order="paper")
configs.train.gossip.graph_from_epoch = None  # {"30": another}: configs/topology/*_first.py
configs.train.gossip.mixing = Config(uniform, _partial_=True)
configs.train.gossip.message = None  # fp32; fp16.py, bf16.py, int8.py: smaller messages
configs.train.gossip.blocking = False  # True: wait for neighbours right after each step
