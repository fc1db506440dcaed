"""Every rank trains a model of its own and averages it with a few neighbours': one file for each way to do that,
with a file of configs/topology after it to say who the neighbours are.
"""

from dgc_training.config import configs

configs.train.csv = True

configs.requires["train.compression._target_"] = "dgc.compression.Dense"  # there are no gradients to compress
configs.requires["train.check_replicas_every"] = 0  # models differ on purpose
