"""As between a worker and MXNet's parameter server: codes to the server, full precision back."""

from dgc_training.config import configs

configs.train.compression.wire = "server"
