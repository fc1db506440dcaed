"""Muon in the ranks, and the mean of their models every 10 steps, without outer momentum.

Each rank keeps a longer momentum (0.98): it averages the noise of the rank's own batches. Add
configs/local/momentum.py to average the momenta too, or fourbit.py, twobit.py or sign.py to compress the
pseudo-gradients, whose errors are fed back.
"""

from dgc.local import OuterSteps
from dgc_training.config import Config, configs, derived

configs.train.optimizer.momentum = 0.98

if configs.train.local is None:
    configs.train.local = Config(OuterSteps, base=derived("train.gossip"), compression=None)
    configs.train.local.average_momentum = False
configs.train.local.average_every = 10  # steps between two exchanges
configs.train.local.outer = None

configs.requires["train.compression._target_"] = "dgc.compression.DenseCompressor"  # no gradients are compressed
configs.requires["train.check_replicas_every"] = 0  # models differ between exchanges
