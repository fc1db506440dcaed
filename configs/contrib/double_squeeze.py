"""DoubleSqueeze (Tang et al. 2019): signs to the servers and back, with error feedback in both directions."""

from dgc.contrib import DoubleSqueezeCompressor
from dgc_training.config import Config, configs

configs.train.compression = Config(DoubleSqueezeCompressor)

configs.requires["train.compression._target_"] = configs.train.compression._target_
