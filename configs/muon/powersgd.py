"""PowerSGD of rank 4 for the matrices of Muon, with both factors in every step, and 4 bits for embeddings.

The library warns of it: Muon makes the singular values alike that PowerSGD leaves out. See docs/methods.md.
"""

from dgc.compression import DenseCompressor, PowerSGDCompressor, Route, Rule, TwoPhaseCompressor
from dgc_training.config import Config, configs

configs.train.compression = Config(Route)
configs.train.compression.rules = [
    Config(Rule, compressor=Config(TwoPhaseCompressor, bits=4), name="*embed*", min_dim=2),
    Config(Rule, compressor=Config(PowerSGDCompressor, rank=4, num_iters_per_step=2), min_dim=2),
    Config(Rule, compressor=Config(DenseCompressor)),
]

configs.requires["train.compression._target_"] = configs.train.compression._target_
