"""Threshold-v: sends elements of at least a given magnitude, at most as many as the ratio allows."""

from dgc.compression import SparseCompressor
from dgc.memory import ResidualMemory
from dgc.sparse.selectors import Fixed
from dgc_training.config import Config, configs

configs.train.compression = Config(SparseCompressor)
configs.train.compression.compress_ratio = 0.05  # share of a tensor's elements that is sent at most
configs.train.compression.memory = Config(ResidualMemory)
configs.train.compression.selector = Config(Fixed)
configs.train.compression.selector.threshold = 0.01  # in units of the gradient

configs.requires["train.dgc"] = False  # its memory and its optimizer would remain
configs.requires["train.compression._target_"] = configs.train.compression._target_
