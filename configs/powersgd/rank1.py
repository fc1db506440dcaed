"""Rank 1."""

from training.config import configs

configs.train.compression.rank = 1
