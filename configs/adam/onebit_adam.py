"""1-bit Adam (Tang et al. 2021, arXiv 2102.02888): dense at first, then momentum in 1 bit in each direction."""

from dgc.compression import OneBitAdamCompressor
from dgc.optim import OneBitAdam
from dgc_training.config import Config, configs

configs.train.optimizer._target_ = OneBitAdam
configs.train.optimizer.freeze_step = 100  # steps of the warm-up, 15 to 25 % of all and all that warm up lr

configs.train.compression = Config(OneBitAdamCompressor)
configs.train.compression.gradients = None  # fp32; configs/adam/fp16 halves it

configs.requires["train.optimizer._target_"] = configs.train.optimizer._target_
configs.requires["train.compression._target_"] = configs.train.compression._target_
