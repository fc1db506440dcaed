"""The method stacked before this file takes tensors of two and more dimensions; all others travel dense."""

from dgc.compression import Dense, Route, Rule
from dgc_training.config import Config, configs

method = configs.train.compression
configs.train.compression = Config(Route)
configs.train.compression.rules = [
    Config(Rule, compressor=method, min_dim=2),
    Config(Rule, compressor=Config(Dense)),
]

# The method keeps what it needs, one level further down.
configs.requires.pop("train.compression._target_", None)
configs.requires["train.compression.rules.0.compressor._target_"] = method._target_
