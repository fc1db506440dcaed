"""bfloat16 on the wire and sums in fp32, in two phases: half the bytes of fp32 for any number of ranks."""

from dgc.compression import TwoPhaseCompressor
from dgc_training.config import Config, configs

configs.train.compression = Config(TwoPhaseCompressor)
configs.train.compression.bits = 16
configs.train.compression.error_feedback = False
configs.train.compression.random = False  # round stochastically
configs.train.compression.seed = 0  # of stochastic rounding

configs.requires["train.compression._target_"] = configs.train.compression._target_
