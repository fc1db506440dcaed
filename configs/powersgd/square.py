"""Each bucket as one square matrix: few bytes and little work, at rank 1 or 2 of much less than a tensor each."""

from dgc_training.config import configs

configs.train.compression.mode = "square"
configs.train.compression.num_iters_per_step = 1
