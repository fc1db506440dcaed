"""MXNet's 2-bit compression: gradients as -t, 0 and t."""

from dgc_training.config import configs

configs.train.compression.bits = 2
configs.train.compression.threshold = 0.5
