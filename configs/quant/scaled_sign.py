"""EF-signSGD (Karimireddy et al. 2019): signs times each tensor's mean magnitude, with error feedback."""

from dgc.compression import ScaledSignCompressor
from dgc_training.config import Config, configs

configs.train.compression = Config(ScaledSignCompressor)
configs.train.compression.error_feedback = True

configs.requires["train.compression._target_"] = configs.train.compression._target_
