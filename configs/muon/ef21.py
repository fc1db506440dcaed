"""EF21-Muon (arXiv 2510.00643): the largest 5 % of each matrix, as changes of its momentum, without Muon's own.

Embeddings are sent in 4 bits, and other tensors dense.
"""

from dgc.compression import DenseCompressor, DGCCompressor, EF21Compressor, Route, Rule, TwoPhaseCompressor
from dgc.memory import ResidualMemory
from dgc_training.config import Config, configs

configs.train.optimizer.momentum = 0.0  # EF21's momentum takes its place
configs.train.optimizer.nesterov = False

top = Config(DGCCompressor, compress_ratio=0.05, memory=Config(ResidualMemory), indices="int32")
configs.train.compression = Config(Route)
configs.train.compression.rules = [
    Config(Rule, compressor=Config(TwoPhaseCompressor, bits=4), name="*embed*", min_dim=2),
    Config(Rule, compressor=Config(EF21Compressor, compressor=top, beta=0.05), min_dim=2),
    Config(Rule, compressor=Config(DenseCompressor)),
]

configs.requires["train.compression._target_"] = configs.train.compression._target_
