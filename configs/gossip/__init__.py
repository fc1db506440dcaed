"""Every rank trains its own model and averages it with a few neighbours. There is one file per algorithm.

A file of configs/topology after it sets the neighbours.
"""

from dgc_training.config import Config, configs

configs.train.recorder = Config("scripts.gossip.rank_csv.StepRecorder")  # CSV files of every rank

configs.requires["train.compression._target_"] = "dgc.compression.DenseCompressor"  # no gradients are compressed
configs.requires["train.check_replicas_every"] = 0  # gossip allows models to differ
