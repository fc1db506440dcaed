"""All-reduce SGD, the baseline for gossip: gradients are averaged over all ranks in each step."""

from dgc_training.config import configs

configs.train.gossip = None
