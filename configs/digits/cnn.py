"""A plain convolutional network with 226,794 parameters."""

from dgc_models import DigitsCNN
from dgc_training.config import Config, configs, derived

configs.model = Config(DigitsCNN, num_classes=derived("dataset.num_classes"), width=32)
