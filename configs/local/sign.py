"""Pseudo-gradients as signs times each tensor's mean magnitude, with error feedback (Karimireddy et al. 2019)."""

from dgc.compression import ScaledSignCompressor
from dgc_training.config import Config, configs

configs.train.local.compression = Config(ScaledSignCompressor)
