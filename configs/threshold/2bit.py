"""MXNet's 2-bit compression: every element is sent as -t, 0 or t."""

from dgc_training.config import configs

configs.train.compression.bits = 2
configs.train.compression.threshold = 0.5
