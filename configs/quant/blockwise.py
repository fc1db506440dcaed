"""8 bits by blocks, rounded to the nearest level, with error feedback."""

from dgc.compression import BlockwiseCompressor
from dgc_training.config import Config, configs

configs.train.compression = Config(BlockwiseCompressor)
configs.train.compression.bits = 8  # or 4
configs.train.compression.block = 2048  # elements that share a scale; null: one scale per tensor
configs.train.compression.error_feedback = True

configs.requires["train.compression._target_"] = configs.train.compression._target_
