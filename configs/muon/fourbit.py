"""Gradients in 4 bits, in both directions, with error feedback. Embeddings too: signs of them would ruin a run."""

from dgc.compression import TwoPhaseCompressor
from dgc_training.config import Config, configs

configs.train.compression = Config(TwoPhaseCompressor)
configs.train.compression.bits = 4

configs.requires["train.compression._target_"] = configs.train.compression._target_
