"""GaussianK (Shi et al. 2019): the threshold of a normal distribution, corrected a few times."""

from dgc.selection import Gaussian
from dgc_training.config import Config, configs

configs.train.compression.selector = Config(Gaussian)
configs.train.compression.selector.passes = 4  # maximum number of counts
