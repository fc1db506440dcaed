"""Indices are sent as gaps in a Rice code: about 11.6 bits at 0.1 %, instead of 64."""

from dgc.wire import RiceIndices
from dgc_training.config import Config, configs

configs.train.compression.indices = Config(RiceIndices)
configs.train.compression.int32_indices = False
