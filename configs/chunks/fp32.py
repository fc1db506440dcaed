"""Chunks are summed over the ranks in fp32: 4 bytes per element instead of 2."""

from dgc_training.config import configs

configs.train.compression.dtype = "fp32"
