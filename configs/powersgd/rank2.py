"""Rank 2."""

from dgc_training.config import configs

configs.train.compression.rank = 2
