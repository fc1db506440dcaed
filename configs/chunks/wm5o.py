"""Warm-up of 5 epochs that send everything, as in the paper, then the full ratio."""

from dgc_training.config import configs

configs.train.compression.warmup_epochs = 5
configs.train.compression.warmup_coeff = [1, 1, 1, 1, 1]
