"""Models are sent in bf16, scaled so that nothing overflows. The sender keeps the rounding error."""

from dgc.gossip import Half
from dgc_training.config import Config, configs

if "message" not in (configs.train.gossip or {}):
    raise ValueError(
        "there are no messages to make smaller; stack sgp, osgp or dpsgd of configs/gossip before this file (and "
        "configs/gossip/machines and configs/average after it)"
    )
configs.train.gossip.message = Config(Half, dtype="bf16")
