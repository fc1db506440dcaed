"""MuLoCo (arXiv 2505.23725): DiLoCo with Muon in the ranks, and an outer step of Nesterov momentum every 30 steps.

Its outer rates: 0.7 and 0.6 on one rank, 1.0 and 0.9 on 16. Stack configs/local/twobit.py or sign.py before it to
compress the pseudo-gradients, whose errors are fed back.
"""

from dgc.local import Nesterov, OuterSteps
from dgc_training.config import Config, configs

configs.train.optimizer.momentum = 0.9
configs.train.optimizer.nesterov = False

before = configs.train.local
configs.train.local = Config(OuterSteps)
configs.train.local.average_every = 30  # steps between two exchanges
configs.train.local.outer = Config(Nesterov, outer_lr=0.7, momentum=0.8)
configs.train.local.compression = before.compression if before else None  # of pseudo-gradients; null: none
configs.train.local.average_momentum = before.average_momentum if before else False  # the ranks' own momenta

configs.requires["train.compression._target_"] = "dgc.compression.DenseCompressor"  # no gradients are compressed
configs.requires["train.check_replicas_every"] = 0  # models differ between exchanges
