"""Values are sent as int8 with a scale per tensor: 1 byte instead of 4."""

from dgc_training.config import configs

configs.train.compression.values = "int8"
