"""Rank 2."""

from training.config import configs

configs.train.compression.rank = 2
