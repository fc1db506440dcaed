"""Pseudo-gradients in 2 bits per element: -t, 0 or t, with t from each tensor, and error feedback."""

from dgc.compression import ThresholdCompressor
from dgc_training.config import Config, configs

configs.train.local.compression = Config(ThresholdCompressor)
configs.train.local.compression.bits = 2
configs.train.local.compression.threshold = None  # computed from the data
