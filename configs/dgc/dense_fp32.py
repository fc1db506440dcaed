"""Vectors, which are not compressed, are sent as fp32, whatever the values are: 4 bytes per element."""

from dgc_training.config import configs

configs.train.compression.dense_values = "fp32"
