"""Vectors, which are not compressed, are sent as bf16: 2 bytes per element. What rounding takes is sent later."""

from dgc_training.config import configs

configs.train.compression.dense_values = "bf16"
