"""PowerSGD (Vogels et al. 2019, arXiv 1905.13727) for the experiment stacked before it, with any optimizer.

Momentum and weight decay act on the averaged gradient.
"""

from dgc.compression import PowerSGDCompressor
from dgc_training.config import Config, configs, derived

configs.train.compression = Config(PowerSGDCompressor)
configs.train.compression.rank = 2  # 1, 2, 4, 7 (rank*.py): a higher rank sends more bytes and is closer to dense
configs.train.compression.mode = "residual"  # or "paper" (paper.py), "square" (square.py): a bucket is a matrix
configs.train.compression.num_iters_per_step = 2  # half steps of mode "residual"; 2 cost as much as "paper"
configs.train.compression.min_compression_rate = 2  # a tensor that compression shrinks by less is sent whole
configs.train.compression.start_compressing_after_num_steps = 0  # optimizer steps that send everything
configs.train.compression.warm_start = True  # begin with the last step's factors
configs.train.compression.error_feedback = True  # what a step does not send is added to the next gradient
configs.train.compression.orthogonalization = "auto"  # or qr, gram_schmidt, cholesky_qr, authors
configs.train.compression.epsilon = 1e-8  # a column with at most this share left is replaced by a random one
configs.train.compression.wire = "fp32"  # "fp16" (fp16.py): 2 bytes per number
configs.train.compression.seed = derived("seed")  # of the first factors

configs.requires["train.compression._target_"] = configs.train.compression._target_
