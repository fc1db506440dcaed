"""CHOCO-SGD (Koloskova, Stich, Jaggi 2019, arXiv 1902.00340): neighbours exchange compressed differences."""

from dgc.contrib import CHOCO, TopK
from dgc.gossip import metropolis, two_way_ring
from dgc_training.config import Config, configs

configs.train.gossip = Config(CHOCO)
configs.train.gossip.graph = Config(two_way_ring, _partial_=True)  # or configs/topology: full, grid, ring, star
configs.train.gossip.mixing = Config(metropolis, _partial_=True)
configs.train.gossip.quantizer = Config(TopK, ratio=0.1, values="fp32")  # or Config(Sign): a bit per element
configs.train.gossip.average_every = 1  # steps between two exchanges
configs.train.gossip.gamma = None  # consensus step size; null: twice TopK's ratio, 0.3 for Sign
configs.train.recorder = Config("scripts.gossip.rank_csv.StepRecorder")  # CSV files of every rank

configs.requires["train.compression._target_"] = "dgc.compression.DenseCompressor"  # no gradients are compressed
configs.requires["train.check_replicas_every"] = 0  # gossip allows models to differ
