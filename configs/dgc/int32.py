"""Indices are sent as int32: 4 bytes instead of 8."""

from dgc_training.config import configs

configs.train.compression.indices = "int32"
