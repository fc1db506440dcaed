"""Indices are sent as gaps in a Rice code: about 11.6 bits at 0.1 %, instead of 64."""

from dgc_training.config import configs

configs.train.compression.indices = "rice"
