"""Factors, and what is sent whole, travel as fp16: 2 bytes in place of 4."""

from dgc_training.config import configs

configs.train.compression.wire = "fp16"
