"""Machines are the nodes of the gossip stacked before it, or of SGP. Gradients are averaged inside a machine.

Stack it after all other files of configs/gossip, and after a file of configs/topology.
"""

from dgc.gossip import Machines
from dgc_training.config import Config, configs

configs.train.gossip = Config(Machines, base=configs.train.gossip)  # between machines; null: SGP
