"""No momentum masking: an element that was sent keeps its momentum."""

from dgc_training.config import configs

configs.train.compression.memory.momentum_masking = False
