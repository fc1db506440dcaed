"""Stochastic Gradient Push (Assran et al. 2019, arXiv 1811.10792)."""

from dgc.gossip import SGP, n_peer_exponential, uniform
from dgc_training.config import Config, configs

configs.train.gossip = Config(SGP)
configs.train.gossip.graph = Config(n_peer_exponential, _partial_=True, peers=1)  # or a file of configs/topology
configs.train.gossip.graph_from_epoch = None  # {"30": another}: configs/topology/*_first.py
configs.train.gossip.mixing = Config(uniform, _partial_=True)
configs.train.gossip.message = None  # fp32; fp16.py, bf16.py, int8.py: smaller messages
configs.train.gossip.blocking = False  # True: wait for neighbours right after each step
