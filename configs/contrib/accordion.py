"""Accordion (Agarwal et al. 2020): PowerSGD with a higher rank for tensors whose gradients change fast."""

from dgc.contrib import AccordionCompressor
from dgc_training.config import Config, configs, derived

configs.train.compression = Config(AccordionCompressor)
configs.train.compression.rank = 1
configs.train.compression.high_rank = 4
configs.train.compression.change = 0.5  # threshold for fast changes, as a share of the norm
configs.train.compression.every = 10  # epochs between two choices
configs.train.compression.num_iters_per_step = 2
configs.train.compression.seed = derived("seed")  # of the first factors

configs.requires["train.compression._target_"] = configs.train.compression._target_
