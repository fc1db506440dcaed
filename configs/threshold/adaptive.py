"""2 bits, with a threshold from the data, so that gradients of any scale are quantized alike."""

from dgc_training.config import configs

configs.train.compression.bits = 2
configs.train.compression.threshold = None
