"""MSTopk (Shi et al. 2021): bisection to exactly k elements."""

from dgc.selection import MSTopk
from dgc_training.config import Config, configs

configs.train.compression.selector = Config(MSTopk)
configs.train.compression.selector.passes = 30  # maximum number of counts
