"""Adam for DGC: AdamW with dense gradients at first, then DGC of gradients divided by Adam's second moment.

See docs/methods.md. Set freeze_step to 10 to 20 % of all steps.
"""

from dgc.compression import DGCAdamCompressor
from dgc.optim import DGCAdam
from dgc_training.config import Config, configs

configs.train.optimizer._target_ = DGCAdam
configs.train.optimizer.freeze_step = 100  # steps of the warm-up, at least all that warm up lr

configs.train.compression = Config(DGCAdamCompressor)
configs.train.compression.compress_ratio = 0.01  # share of a tensor's elements that is sent
configs.train.compression.indices = "int32"
configs.train.compression.gradients = None  # fp32; configs/adam/fp16 halves it

configs.requires["train.optimizer._target_"] = configs.train.optimizer._target_
configs.requires["train.compression._target_"] = configs.train.compression._target_
