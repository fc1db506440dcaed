"""RedSync's trimmed top-k (Fang et al. 2019): exact top-k of the elements above a decreasing threshold."""

from dgc.sparse.selectors import Trimmed
from dgc_training.config import Config, configs

configs.train.compression.selector = Config(Trimmed)
configs.train.compression.selector.step = 0.2  # decrease per pass, as a share of maximum - mean
