"""The k largest of every tensor, found in the pass over the gradient itself. This is DGC's default."""

from dgc.sparse.selectors import Predicted
from dgc_training.config import Config, configs

configs.train.compression.selector = Config(Predicted)
configs.train.compression.selector.per_bucket = False  # True: one threshold for all tensors of a bucket
configs.train.compression.selector.margin = 0.98  # floor / predicted threshold; without momentum 0.95 misses less
