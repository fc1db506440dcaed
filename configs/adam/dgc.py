"""DGC's selection and ratio warm-up with Adam: error feedback keeps gradients, and no momentum.

Without the warm-up (warmup_epochs = 0), take about three times the learning rate. See docs/methods.md.
"""

from dgc.compression import DGCCompressor
from dgc.memory import ResidualMemory
from dgc_training.config import Config, configs

configs.train.compression = Config(DGCCompressor)
configs.train.compression.compress_ratio = 0.01  # share of a tensor's elements that is sent
configs.train.compression.indices = "int32"
configs.train.compression.warmup_epochs = 5
configs.train.compression.memory = Config(ResidualMemory)

configs.requires["train.compression._target_"] = configs.train.compression._target_
