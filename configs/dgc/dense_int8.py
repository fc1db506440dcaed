"""Vectors, which are not compressed, are sent as int8: 1 byte per element. What rounding takes is sent later."""

from dgc_training.config import configs

configs.train.compression.dense_values = "int8"
