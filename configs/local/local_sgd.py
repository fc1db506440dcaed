"""Local SGD (Stich 2019, arXiv 1805.09767): ranks train alone and average their models every 8 steps."""

from dgc_training.config import configs

configs.train.local.average_every = 8
