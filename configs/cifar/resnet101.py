"""ResNet-101 for 32x32 images (He et al. 2016, table 1), 42,512,970 parameters.

The original has no such file. The weight decay is the usual one for this width.
"""

from dgc_models import resnet101
from dgc_training.config import Config, configs, derived

configs.model = Config(resnet101, num_classes=derived("dataset.num_classes"))
configs.train.optimizer.weight_decay = 5e-4
