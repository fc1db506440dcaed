"""Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512): parts of the model at a time, during training."""

from dgc.local import Nesterov
from dgc_training.config import Config, configs

configs.train.local.average_every = 50
configs.train.local.outer = Config(Nesterov, outer_lr=0.7, momentum=0.9)
configs.train.local.fragment_mb = 25.0
configs.train.local.delay = 2
configs.train.local.alpha = 0.5
