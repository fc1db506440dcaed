"""Plain top-k with error feedback (Stich et al. 2018): DGC without its momentum correction."""

from dgc.compression import SparseCompressor
from dgc.memory import ResidualMemory
from dgc_training.config import Config, configs

configs.train.compression = Config(SparseCompressor)
configs.train.compression.compress_ratio = 0.01  # share of a tensor's elements that is sent
configs.train.compression.memory = Config(ResidualMemory)
configs.train.compression.selector = None  # as in configs/selection
configs.train.compression.values = None  # as in configs/dgc
configs.train.compression.indices = None
configs.train.compression.dense_values = None

configs.requires["train.dgc"] = False  # its memory and its optimizer would remain
configs.requires["train.compression._target_"] = configs.train.compression._target_
