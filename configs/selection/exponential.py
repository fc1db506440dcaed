"""SIDCo (Abdelmoniem et al. 2021): exponential fits in stages, as many as the counts of past steps ask for."""

from dgc.selection import Exponential
from dgc_training.config import Config, configs

configs.train.compression.selector = Config(Exponential)
configs.train.compression.selector.period = 5  # steps between changes of the number of stages
configs.train.compression.selector.lower = 0.8  # mean counts, by k, that leave it as it is
configs.train.compression.selector.upper = 1.2
