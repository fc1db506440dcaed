"""SIDCo (Abdelmoniem et al. 2021): exponential fits in stages. Past counts determine the number of stages."""

from dgc.selection import Exponential
from dgc_training.config import Config, configs

configs.train.compression.selector = Config(Exponential)
configs.train.compression.selector.period = 5  # steps between changes of the number of stages
configs.train.compression.selector.lower = 0.8  # mean count / k from lower to upper: the number is unchanged
configs.train.compression.selector.upper = 1.2
