"""The k largest of every tensor, in the pass over the gradient itself; what DGC does unless told otherwise."""

from dgc.selection import Predicted
from dgc_training.config import Config, configs

configs.train.compression.selector = Config(Predicted)
configs.train.compression.selector.per_bucket = False  # True: one threshold for all tensors of a bucket
configs.train.compression.selector.margin = 0.98  # floor by predicted threshold; without momentum 0.95 misses less
