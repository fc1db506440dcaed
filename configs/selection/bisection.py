"""RedSync's threshold by bisection between mean and maximum (Fang et al. 2019)."""

from dgc.selection import Bisection
from dgc_training.config import Config, configs

configs.train.compression.selector = Config(Bisection)
configs.train.compression.selector.lower = 1.0  # counts that are accepted, by k
configs.train.compression.selector.upper = 2.0
configs.train.compression.selector.passes = 10  # counts at most
