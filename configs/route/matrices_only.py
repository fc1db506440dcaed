"""The method stacked before this file compresses tensors of two or more dimensions. All others are sent dense."""

from dgc.compression import DenseCompressor, Route, Rule
from dgc_training.config import Config, configs

method = configs.train.compression
configs.train.compression = Config(Route)
configs.train.compression.rules = [
    Config(Rule, compressor=method, min_dim=2),
    Config(Rule, compressor=Config(DenseCompressor)),
]

# The requirement of the method moves to its new key.
configs.requires.pop("train.compression._target_", None)
configs.requires["train.compression.rules.0.compressor._target_"] = method._target_
