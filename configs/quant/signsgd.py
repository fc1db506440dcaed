"""signSGD with majority vote (Bernstein et al. 2018): the ranks vote on the sign of each element."""

from dgc.compression import SignSGDCompressor
from dgc_training.config import Config, configs

configs.train.compression = Config(SignSGDCompressor)
configs.train.compression.momentum = 0.0  # 0.9: Signum, the signs of a running average of gradients
configs.train.optimizer.lr = 1e-4  # every element moves by this much
configs.train.optimizer.momentum = 0.0

configs.requires["train.compression._target_"] = configs.train.compression._target_
