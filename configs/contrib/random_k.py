"""Random-k: the same random elements on every rank, so that only values are sent."""

from dgc.contrib import RandomKCompressor
from dgc_training.config import Config, configs, derived

configs.train.compression = Config(RandomKCompressor)
configs.train.compression.compress_ratio = 0.05  # share of a tensor's elements that is sent
configs.train.compression.error_feedback = True
configs.train.compression.values = "fp32"  # or fp16
configs.train.compression.seed = derived("seed")
# An element waits 1 / compress_ratio steps on average. With this delay, momentum makes training diverge.
configs.train.optimizer.momentum = 0.0

configs.requires["train.compression._target_"] = configs.train.compression._target_
