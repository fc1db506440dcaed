"""Rank 4."""

from training.config import configs

configs.train.compression.rank = 4
