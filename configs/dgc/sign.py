"""Values travel as signs with a mean magnitude per tensor: 1 bit in place of 32."""

from dgc.wire import SignValues
from dgc_training.config import Config, configs

configs.train.compression["values"] = Config(SignValues)
