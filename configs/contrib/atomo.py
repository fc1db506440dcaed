"""Atomo (Wang et al. 2018): unbiased random choice of singular vectors. Slow."""

from dgc.contrib import AtomoCompressor
from dgc_training.config import Config, configs, derived

configs.train.compression = Config(AtomoCompressor)
configs.train.compression.rank = 2
configs.train.compression.seed = derived("seed")

configs.requires["train.compression._target_"] = configs.train.compression._target_
