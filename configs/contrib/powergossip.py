"""PowerGossip (Vogels, Karimireddy, Jaggi 2020, arXiv 2008.01425): low-rank differences between neighbours."""

from dgc.contrib import PowerGossip
from dgc.gossip import metropolis, two_way_ring
from dgc_training.config import Config, configs

configs.train.gossip = Config(PowerGossip)
configs.train.gossip.graph = Config(two_way_ring, _partial_=True)  # or a symmetric one of configs/topology
configs.train.gossip.mixing = Config(metropolis, _partial_=True)
configs.train.gossip.rank = 1  # rank of the approximation of a difference: 1, 2, 4
configs.train.gossip.num_iters_per_step = 2  # half steps of the power iteration, each with one message
configs.train.gossip.seed = 0  # of the first factors
configs.train.gossip.average_every = 1  # steps between two exchanges
configs.train.recorder = Config("scripts.gossip.rank_csv.StepRecorder")  # CSV files of every rank

configs.requires["train.compression._target_"] = "dgc.compression.DenseCompressor"  # no gradients are compressed
configs.requires["train.check_replicas_every"] = 0  # gossip allows models to differ
