"""The k largest of every tensor, found after the pass over the gradient."""

from dgc.sparse.selectors import Exact
from dgc_training.config import Config, configs

configs.train.compression.selector = Config(Exact)
configs.train.compression.selector.per_bucket = False  # True: one threshold for all tensors of a bucket
