"""Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512): parts of the model at a time, during training."""

from dgc.outer import Nesterov
from dgc_training.config import Config, configs

configs.train.gossip.average_every = 50
configs.train.gossip.outer = Config(Nesterov, outer_lr=0.7, momentum=0.9)
configs.train.gossip.fragment_mb = 25.0
configs.train.gossip.delay = 2
configs.train.gossip.alpha = 0.5
