"""GaussianK (Shi et al. 2019): a normal distribution's threshold, corrected a few times."""

from dgc.selection import Gaussian
from dgc_training.config import Config, configs

configs.train.compression.selector = Config(Gaussian)
configs.train.compression.selector.passes = 4  # counts at most
