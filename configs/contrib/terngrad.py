"""TernGrad (Wen et al. 2017): random rounding to -s, 0 and s of each tensor."""

from dgc.contrib import TernGradCompressor
from dgc_training.config import Config, configs

configs.train.compression = Config(TernGradCompressor)
configs.train.compression.clip = 2.5  # gradients are clipped to this many standard deviations; null: not at all
configs.train.compression.error_feedback = False

configs.requires["train.compression._target_"] = configs.train.compression._target_
