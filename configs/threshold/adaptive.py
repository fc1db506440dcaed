"""2 bits, with a threshold from the data: a gradient of any scale sends alike."""

from dgc_training.config import configs

configs.train.compression.bits = 2
configs.train.compression.threshold = None
