"""ResNet-110 of the CIFAR family (He et al. 2016, section 4.2), 1,727,962 parameters."""

from dgc_models import resnet110
from dgc_training.config import Config, configs, derived

configs.model = Config(resnet110, num_classes=derived("dataset.num_classes"))
