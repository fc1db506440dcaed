"""Indices travel as gaps in a Rice code: about 11.6 bits at 0.1 %, in place of 64."""

from dgc.wire import RiceIndices
from dgc_training.config import Config, configs

configs.train.compression.indices = Config(RiceIndices)
