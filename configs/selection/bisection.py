"""RedSync's threshold by bisection between mean and maximum (Fang et al. 2019)."""

from dgc.selection import Bisection
from dgc_training.config import Config, configs

configs.train.compression.selector = Config(Bisection)
configs.train.compression.selector.lower = 1.0  # smallest count that is accepted, as a multiple of k
configs.train.compression.selector.upper = 2.0
configs.train.compression.selector.passes = 10  # maximum number of counts
