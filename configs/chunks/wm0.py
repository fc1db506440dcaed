"""No warm-up: the full ratio from the first step on."""

from dgc_training.config import configs

configs.train.compression.warmup_epochs = 0
configs.train.compression.warmup_coeff = None
