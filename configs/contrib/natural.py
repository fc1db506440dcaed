"""Natural compression (Horvath et al. 2019): random rounding to powers of two."""

from dgc.contrib import NaturalCompressor
from dgc_training.config import Config, configs

configs.train.compression = Config(NaturalCompressor)
configs.train.compression.random = True  # False: to the nearest one
configs.train.compression.error_feedback = False

configs.requires["train.compression._target_"] = configs.train.compression._target_
