"""Warm-up over 5 epochs, ratio ** ((epoch + 1) / 5): at 0.1 % that is 0.25, 0.063, 0.016, 0.004, 0.001.

Differences from the original: it documents the same ratios, but its exponent is (epoch + 1) / 6.
"""

from dgc_training.config import configs

configs.train.compression.warmup_epochs = 5
configs.train.compression.warmup_coeff = None
