"""8 bits by blocks, reduced in two phases with error feedback: the bytes do not grow with the ranks."""

from dgc.compression import TwoPhaseCompressor
from dgc_training.config import Config, configs

configs.train.compression = Config(TwoPhaseCompressor)
configs.train.compression.bits = 8
configs.train.compression.second_bits = 8  # of the means
configs.train.compression.block = 256  # elements that share a scale: 64, 128, 256 or 512
configs.train.compression.error_feedback = True
configs.train.compression.hadamard = False  # transform each 64 elements before they are rounded

configs.requires["train.compression._target_"] = configs.train.compression._target_
