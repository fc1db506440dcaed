"""Embeddings send their largest gradients, other matrices a low-rank approximation. All other tensors are dense.

The name in a rule is a shell pattern that is matched with the parameter's name.
"""

from dgc.compression import DenseCompressor, DGCCompressor, PowerSGDCompressor, Route, Rule
from dgc.memory import ResidualMemory
from dgc_training.config import Config, configs

sparse = Config(DGCCompressor, compress_ratio=0.01, memory=Config(ResidualMemory))

configs.train.compression = Config(Route)
configs.train.compression.rules = [
    Config(Rule, compressor=sparse, name="*embed*", min_dim=2),
    Config(Rule, compressor=Config(PowerSGDCompressor, rank=4), min_dim=2),
    Config(Rule, compressor=Config(DenseCompressor)),
]

configs.requires["train.compression._target_"] = configs.train.compression._target_
