"""Muon in the ranks, and the mean of their models every 10 steps, without outer momentum.

Each rank keeps a longer momentum (0.98): it averages the noise of the rank's own batches. Stack
configs/local/momentum.py before it to average the momenta too, or fourbit.py, twobit.py or sign.py to compress
the pseudo-gradients, whose errors are fed back.
"""

from dgc.local import OuterSteps
from dgc_training.config import Config, configs

configs.train.optimizer.momentum = 0.98

before = configs.train.local
configs.train.local = Config(OuterSteps)
configs.train.local.average_every = 10  # steps between two exchanges
configs.train.local.compression = before.compression if before else None  # of pseudo-gradients; null: none
configs.train.local.average_momentum = before.average_momentum if before else False  # the ranks' own momenta

configs.requires["train.compression._target_"] = "dgc.compression.DenseCompressor"  # no gradients are compressed
configs.requires["train.check_replicas_every"] = 0  # models differ between exchanges
