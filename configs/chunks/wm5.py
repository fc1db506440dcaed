"""Warm-up over 5 epochs, ratio ** ((epoch + 1) / 5): at 10 % that is 0.63, 0.4, 0.25, 0.16, 0.1."""

from dgc_training.config import configs

configs.train.compression.warmup_epochs = 5
configs.train.compression.warmup_coeff = None
