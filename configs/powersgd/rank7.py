"""Rank 7."""

from training.config import configs

configs.train.compression.rank = 7
