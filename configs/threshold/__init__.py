"""Threshold quantization, MXNet's gradient compression, for the experiment stacked before it."""

from dgc.compression import Threshold
from dgc_training.config import Config, configs

configs.train.compression = Config(Threshold)
configs.train.compression.bits = 2  # or 1
configs.train.compression.threshold = 0.5  # what an element sends at most; null, 2 bits: from the data
configs.train.compression.factor = 1.0  # with a threshold from the data: that times the root mean square
configs.train.compression.wire = "auto"  # gather, scatter or server: who adds up, and what travels back
configs.train.compression.error_feedback = True

configs.requires["train.compression._target_"] = configs.train.compression._target_
