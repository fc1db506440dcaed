"""MXNet's 1-bit compression: every element is sent as 1 or -1."""

from dgc_training.config import configs

configs.train.compression.bits = 1
configs.train.compression.threshold = 0.0
