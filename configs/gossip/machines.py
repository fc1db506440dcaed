"""Machines are the nodes of the gossip stacked before, or of SGP: inside each, gradients are averaged.

Stack it last of configs/gossip, and after a file of configs/topology.
"""

from dgc.gossip import Machines
from dgc_training.config import Config, configs

configs.train.gossip = Config(Machines, base=configs.train.gossip)  # between machines; null: SGP
