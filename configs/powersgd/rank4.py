"""Rank 4."""

from dgc_training.config import configs

configs.train.compression.rank = 4
