"""Pseudo-gradients by PowerSGD (Vogels et al. 2019, arXiv 1905.13727), with error feedback."""

from dgc.compression import PowerSGDCompressor
from dgc_training.config import Config, configs, derived

configs.train.local.compression = Config(PowerSGDCompressor)
configs.train.local.compression.rank = 4
configs.train.local.compression.mode = "residual"  # as in configs/powersgd
configs.train.local.compression.seed = derived("seed")
