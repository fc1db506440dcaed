"""Each rank sums and selects again a part of the bucket: bytes per rank do not grow with the number of ranks."""

from dgc_training.config import configs

configs.train.compression.exchange = "reduce_scatter"
