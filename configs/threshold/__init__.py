"""Threshold quantization, MXNet's gradient compression, for the experiment stacked before it."""

from dgc.compression import ThresholdCompressor
from dgc_training.config import Config, configs

configs.train.compression = Config(ThresholdCompressor)
configs.train.compression.bits = 2  # or 1
configs.train.compression.threshold = 0.5  # the largest magnitude sent; null, with 2 bits: computed from the data
configs.train.compression.factor = 1.0  # with a threshold from the data: its ratio to the root mean square
configs.train.compression.wire = "auto"  # or gather, scatter, server: where codes are summed, and what is returned
configs.train.compression.error_feedback = True

configs.requires["train.compression._target_"] = configs.train.compression._target_
