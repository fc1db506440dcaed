"""The k largest of every tensor by radix digits, `radixSelect`: the baseline of studies of selection."""

from dgc.sparse.selectors import Radix
from dgc_training.config import Config, configs

configs.train.compression.selector = Config(Radix)
configs.train.compression.selector.per_bucket = False  # True: one threshold for all tensors of a bucket
