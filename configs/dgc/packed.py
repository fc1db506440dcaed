"""Indices are sent as packed gaps: about 13 bits at 0.1 %, instead of 64."""

from dgc.wire import PackedIndices
from dgc_training.config import Config, configs

configs.train.compression.indices = Config(PackedIndices)
configs.train.compression.int32_indices = False
