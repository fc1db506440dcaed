"""Values are sent as bf16: 2 bytes instead of 4."""

from dgc_training.config import configs

configs.train.compression.values = "bf16"
