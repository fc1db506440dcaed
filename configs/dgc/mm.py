"""Momentum masking: an element that was sent loses its momentum (section 3.3)."""

from dgc_training.config import configs

configs.train.compression.memory.momentum_masking = True
