"""Overlap SGP (Assran et al. 2019): messages overlap with forward and backward."""

from dgc.gossip import OSGP, n_peer_exponential, uniform
from dgc_training.config import Config, configs

configs.train.gossip = Config(OSGP)
configs.train.gossip.graph = Config(n_peer_exponential, _partial_=True, peers=1)  # or a file of configs/topology
configs.train.gossip.graph_from_epoch = None  # {"30": another}: configs/topology/*_first.py
configs.train.gossip.mixing = Config(uniform, _partial_=True)
configs.train.gossip.message = None  # fp32; fp16.py, bf16.py, int8.py: smaller messages
configs.train.gossip.synch_freq = 0  # steps without a neighbour's message before the rank waits for it
configs.train.gossip.overlap = True  # False: send after the step, as in SGP, but wait by synch_freq
configs.train.gossip.biased = False  # True: the paper's ablation without push-sum's weights
