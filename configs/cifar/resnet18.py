"""ResNet-18 for 32x32 images, 11,173,962 parameters.

The original has no such file. The weight decay is the usual one for this width.
"""

from dgc_models import resnet18
from dgc_training.config import Config, configs, derived

configs.model = Config(resnet18, num_classes=derived("dataset.num_classes"))
configs.train.optimizer.weight_decay = 5e-4
