"""Models are sent in bf16, scaled to avoid overflow. The sender keeps the rounding error."""

from dgc.gossip import HalfPrecisionMessage
from dgc_training.config import Config, configs

if "message" not in (configs.train.gossip or {}):
    raise ValueError(
        "the algorithm stacked before has no `message`: stack sgp, osgp or dpsgd of configs/gossip before this "
        "file, and configs/gossip/machines after it"
    )
configs.train.gossip.message = Config(HalfPrecisionMessage, dtype="bf16")
