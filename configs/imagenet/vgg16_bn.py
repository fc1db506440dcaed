"""VGG-16 with batch norm, 138,365,992 parameters."""

from dgc_training.config import Config, configs, derived

configs.model = Config("torchvision.models.vgg16_bn", num_classes=derived("dataset.num_classes"))
