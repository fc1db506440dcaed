"""Gossip between machines by the algorithm stacked before, or SGP. Gradients are averaged inside a machine.

Stack it after all other files of configs/gossip, and after a file of configs/topology.
"""

from dgc.gossip import HierarchicalGossip
from dgc_training.config import Config, configs

configs.train.gossip = Config(HierarchicalGossip, base=configs.train.gossip)  # between machines; null: SGP
