"""gTop-k (Shi et al. 2019): pairs of ranks add what they have selected, and select again."""

from dgc.contrib import GTopKCompressor
from dgc_training.config import Config, configs

configs.train.compression = Config(GTopKCompressor)
configs.train.compression.compress_ratio = 0.01  # share of a tensor's elements that a rank selects

configs.requires["train.compression._target_"] = configs.train.compression._target_
