"""CHOCO-SGD (Koloskova, Stich, Jaggi 2019, arXiv 1902.00340): neighbours exchange compressed differences."""

from dgc.gossip import CHOCO, TopK, metropolis, two_way_ring
from dgc_training.config import Config, configs

configs.train.gossip = Config(CHOCO)
configs.train.gossip.graph = Config(two_way_ring, _partial_=True)  # or configs/topology: full, grid, ring, star
configs.train.gossip.mixing = Config(metropolis, _partial_=True)
configs.train.gossip.quantizer = Config(TopK, ratio=0.1, values="fp32")  # or Config(Sign): a bit per element
configs.train.gossip.average_every = 1  # steps between two exchanges
configs.train.gossip.gamma = None  # consensus step size; null: twice TopK's ratio, 0.3 for Sign
