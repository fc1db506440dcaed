"""Values travel as fp16: 2 bytes in place of 4."""

from dgc_training.config import configs

configs.train.compression.fp16_values = True
