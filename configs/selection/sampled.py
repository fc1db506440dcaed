"""The original's sampled threshold (Lin et al. 2018), adapted until the count is within its bounds."""

from dgc.sparse.selectors import Sampled
from dgc_training.config import Config, configs

configs.train.compression.selector = Config(Sampled)
configs.train.compression.selector.sample_ratio = 0.01  # share sampled
configs.train.compression.selector.strided_sample = True  # every n-th element; False: random elements
configs.train.compression.selector.compress_upper_bound = 1.3  # above 1.3 k the threshold is adapted
configs.train.compression.selector.compress_lower_bound = 0.8  # below 0.8 k as well
configs.train.compression.selector.max_adaptation_iters = 10  # maximum number of adaptations
configs.train.compression.selector.resample = True  # if too many elements pass: exact top-k among them
