"""As between a worker and MXNet's parameter server: codes one way, full precision back."""

from dgc_training.config import configs

configs.train.compression.wire = "server"
