"""The k largest of every tensor, with a floor estimated from a sample before the pass over the gradient.

It needs no state of earlier steps.
"""

from dgc.selection import Histogram
from dgc_training.config import Config, configs

configs.train.compression.selector = Config(Histogram)
configs.train.compression.selector.per_bucket = False  # True: one threshold for all tensors of a bucket
