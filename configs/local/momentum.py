"""Ranks continue from the mean of their momenta too, for the bytes of a second model. With configs/muon/local.

Compressed in few bits momenta do harm: their errors are returned too late (docs/local.md).
"""

from dgc_training.config import configs

configs.train.local.average_momentum = True
