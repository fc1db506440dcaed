"""LDTE-BS (Chen et al. 2021): the threshold of a Laplace distribution, corrected by binary search."""

from dgc.sparse.selectors import Laplace
from dgc_training.config import Config, configs

configs.train.compression.selector = Config(Laplace)
configs.train.compression.selector.stop = "tight"  # counts accepted: tight .8-1.25, redsync 1-2, exact
configs.train.compression.selector.method = "bisection"  # or secant
configs.train.compression.selector.warm_start = False  # True: begin with the threshold of the last step
configs.train.compression.selector.passes = 12  # maximum number of counts
