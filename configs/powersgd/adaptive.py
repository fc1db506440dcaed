"""Rank 4 while a tensor's gradients change fast, rank 1 otherwise (Agarwal et al. 2020, arXiv 2010.16248)."""

from dgc_training.config import configs

configs.train.compression.rank = 1
configs.train.compression.high_rank = 4
configs.train.compression.rank_every = 10
