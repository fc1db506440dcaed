"""The best low-rank approximation of each rank's gradient, by singular value decomposition. Slow."""

from dgc.contrib import SVDCompressor
from dgc_training.config import Config, configs

configs.train.compression = Config(SVDCompressor)
configs.train.compression.rank = 2
configs.train.compression.error_feedback = True

configs.requires["train.compression._target_"] = configs.train.compression._target_
