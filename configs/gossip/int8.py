"""Models are sent in 8 bits with a scale for each block. The sender keeps the rounding error."""

from dgc.gossip import Int8
from dgc_training.config import Config, configs

if "message" not in (configs.train.gossip or {}):
    raise ValueError(
        "there are no messages to make smaller; stack sgp, osgp or dpsgd of configs/gossip before this file (and "
        "configs/gossip/machines and configs/average after it)"
    )
configs.train.gossip.message = Config(Int8, block=2048)
