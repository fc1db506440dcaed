"""The k largest of every tensor; a sample suggests a floor before the pass over the gradient. Needs no history."""

from dgc.selection import Histogram
from dgc_training.config import Config, configs

configs.train.compression.selector = Config(Histogram)
configs.train.compression.selector.per_bucket = False  # True: one threshold for all tensors of a bucket
