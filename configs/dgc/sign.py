"""Values are sent as signs with a mean magnitude per tensor: 1 bit instead of 32."""

from dgc.wire import SignValues
from dgc_training.config import Config, configs

configs.train.compression["values"] = Config(SignValues)
configs.train.compression.fp16_values = False
