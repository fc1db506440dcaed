"""All-reduce SGD, which gossip is compared with: gradients are averaged over all ranks in each step."""

from dgc_training.config import configs

configs.train.gossip = None
