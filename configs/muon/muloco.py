"""MuLoCo (arXiv 2505.23725): DiLoCo with Muon in the ranks, and an outer step of Nesterov momentum every 30 steps.

Its outer rates: 0.7 and 0.6 on one rank, 1.0 and 0.9 on 16. Add configs/local/twobit.py or sign.py to compress
the pseudo-gradients, whose errors are fed back.
"""

from dgc.local import Nesterov, OuterSteps
from dgc_training.config import Config, configs, derived

configs.train.optimizer.momentum = 0.9
configs.train.optimizer.nesterov = False

if configs.train.local is None:
    configs.train.local = Config(OuterSteps, base=derived("train.gossip"), compression=None)
    configs.train.local.average_momentum = False
configs.train.local.average_every = 30  # steps between two exchanges
configs.train.local.outer = Config(Nesterov, outer_lr=0.7, momentum=0.8)

configs.requires["train.compression._target_"] = "dgc.compression.DenseCompressor"  # no gradients are compressed
configs.requires["train.check_replicas_every"] = 0  # models differ between exchanges
