"""Square mode treats each bucket as one square matrix: few bytes and little work.

At rank 1 or 2 it describes far less than one factorization per tensor does. Use a higher rank.
"""

from dgc_training.config import configs

configs.train.compression.mode = "square"
configs.train.compression.num_iters_per_step = 1
