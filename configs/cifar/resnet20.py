"""ResNet-20 of the CIFAR family (He et al. 2016, section 4.2), 269,722 parameters."""

from dgc_models import resnet20
from dgc_training.config import Config, configs, derived

configs.model = Config(resnet20, num_classes=derived("dataset.num_classes"))
