"""Pseudo-gradients in 4 bits, in both directions, with error feedback. The bytes hardly grow with the ranks."""

from dgc.compression import TwoPhaseCompressor
from dgc_training.config import Config, configs

configs.train.local.compression = Config(TwoPhaseCompressor)
configs.train.local.compression.bits = 4
