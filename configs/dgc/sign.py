"""Values are sent as signs with a mean magnitude per tensor: 1 bit instead of 32."""

from dgc_training.config import configs

configs.train.compression.values = "sign"
