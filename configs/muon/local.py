"""Muon in the ranks, and the mean of their models every 10 steps, without outer momentum.

Each rank keeps a longer momentum (0.98): it averages the noise of the rank's own batches. Stack
configs/local/twobit.py or sign.py before it to compress the pseudo-gradients, whose errors are fed back.
"""

from dgc.local import OuterSteps
from dgc_training.config import Config, configs

configs.train.optimizer.momentum = 0.98

before = configs.train.local
configs.train.local = Config(OuterSteps)
configs.train.local.average_every = 10  # steps between two exchanges
configs.train.local.compression = before.compression if before else None  # of pseudo-gradients; null: none

configs.requires["train.compression._target_"] = "dgc.compression.DenseCompressor"  # no gradients are compressed
configs.requires["train.check_replicas_every"] = 0  # models differ between exchanges
