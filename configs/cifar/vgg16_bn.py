"""VGG-16 with batch norm for 32x32 images, 14,728,266 parameters.

The original has no such file. The weight decay is the usual one for this width.
"""

from dgc_models import vgg16_bn
from dgc_training.config import Config, configs, derived

configs.model = Config(vgg16_bn, num_classes=derived("dataset.num_classes"))
configs.train.optimizer.weight_decay = 5e-4
