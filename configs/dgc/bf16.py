"""Values are sent as bf16: 2 bytes instead of 4."""

from dgc.wire import CastValues
from dgc_training.config import Config, configs

configs.train.compression["values"] = Config(CastValues, dtype="bf16")
configs.train.compression.fp16_values = False
