"""Values are sent as int8 with a scale per tensor: 1 byte instead of 4."""

from dgc.wire import Int8Values
from dgc_training.config import Config, configs

configs.train.compression["values"] = Config(Int8Values)
configs.train.compression.fp16_values = False
