"""Values are sent as the number of one of 4 means of their tensor: 2 bits instead of 32."""

from dgc.sparse.payloads import TwoBitValues
from dgc_training.config import Config, configs

# width of the 4 bins in standard deviations: 4 for values above one threshold per tensor, 6 for several
configs.train.compression.values = Config(TwoBitValues, range_in_sigmas=4.0)
