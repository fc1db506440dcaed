"""ResNet-56 of the CIFAR family (He et al. 2016, section 4.2), 853,018 parameters.

The original has no such file. The settings are the same as in its other files.
"""

from dgc_models import resnet56
from dgc_training.config import Config, configs, derived

configs.model = Config(resnet56, num_classes=derived("dataset.num_classes"))
