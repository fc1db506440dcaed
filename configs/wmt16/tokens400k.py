"""400K tokens per step on 8 ranks: 16 batches of a rank per step. Stack it after a model, such as big.py."""

from dgc_training.config import configs

configs.train.num_batches_per_step = 16
