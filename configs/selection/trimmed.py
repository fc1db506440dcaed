"""RedSync's trimmed top-k (Fang et al. 2019): an exact top-k of what a falling threshold leaves."""

from dgc.selection import Trimmed
from dgc_training.config import Config, configs

configs.train.compression.selector = Config(Trimmed)
configs.train.compression.selector.step = 0.2  # of the way from the maximum to the mean, each time
