"""1-bit SGD (Seide et al. 2014): signs, and two means for each row, with error feedback."""

from dgc.contrib import OneBitCompressor
from dgc_training.config import Config, configs

configs.train.compression = Config(OneBitCompressor)
configs.train.compression.error_feedback = True

configs.requires["train.compression._target_"] = configs.train.compression._target_
