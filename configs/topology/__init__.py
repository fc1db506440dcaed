"""The communication graph of gossip: one file per graph, stacked after one of configs/gossip."""

from dgc_training.config import configs

if configs.train.gossip is None or "graph" not in configs.train.gossip:
    raise ValueError(
        "configs/topology says who the neighbours are in gossip, and there is none to tell; stack a file of "
        "configs/gossip before it (and configs/gossip/machines after it)"
    )
