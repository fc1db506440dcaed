"""Random block: consecutive elements from a random start, equal on every rank."""

from dgc.contrib import RandomBlockCompressor
from dgc_training.config import Config, configs, derived

configs.train.compression = Config(RandomBlockCompressor)
configs.train.compression.compress_ratio = 0.2  # share of a tensor's elements that is sent
configs.train.compression.error_feedback = True
configs.train.compression.values = "fp32"  # or fp16
configs.train.compression.seed = derived("seed")
# An element waits 1 / compress_ratio steps on average. With this delay, momentum makes training diverge.
configs.train.optimizer.momentum = 0.0

configs.requires["train.compression._target_"] = configs.train.compression._target_
