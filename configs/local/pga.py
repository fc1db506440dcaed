"""A mean of all models every 16 steps; with a file of configs/gossip, Gossip-PGA (Chen et al. 2021)."""

from dgc_training.config import configs

configs.train.local.average_every = 16  # arXiv 2105.09080
