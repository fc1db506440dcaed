"""The paper's algorithm: P and Q once in each step."""

from dgc_training.config import configs

configs.train.compression.mode = "paper"
configs.train.compression.num_iters_per_step = 1
