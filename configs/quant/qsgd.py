"""QSGD (Alistarh et al. 2017): random rounding to a few levels of each block."""

from dgc.compression import QSGDCompressor
from dgc_training.config import Config, configs

configs.train.compression = Config(QSGDCompressor)
configs.train.compression.bits = 4  # 2, 4 or 8, including the sign
configs.train.compression.block = 512  # elements that share a scale; null: one scale per tensor
configs.train.compression.norm = "max"  # or l2
configs.train.compression.error_feedback = False

configs.requires["train.compression._target_"] = configs.train.compression._target_
