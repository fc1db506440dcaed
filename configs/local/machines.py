"""Machines exchange, by the files of this folder stacked before. A machine averages its gradients in each step."""

from dgc.gossip import HierarchicalGossip
from dgc_training.config import Config, configs

configs.train.local = Config(HierarchicalGossip, base=configs.train.local)
