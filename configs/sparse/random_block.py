"""Random block: the same neighbouring elements on every rank, from a random start."""

from dgc.compression import RandomBlock
from training.config import Config, configs, derived

configs.train.compression = Config(RandomBlock)
configs.train.compression.compress_ratio = 0.05  # share of a tensor's elements that is sent
configs.train.compression.error_feedback = True
configs.train.compression["values"] = "fp32"  # or fp16
configs.train.compression.seed = derived("seed")

configs.requires["train.compression._target_"] = configs.train.compression._target_
