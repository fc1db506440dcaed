"""VGG-19 with batch norm for 32x32 images (Simonyan and Zisserman 2015, column E), 20,040,522 parameters.

Not among the original's files; learning rate and weight decay are the paper's.
"""

from dgc_models import vgg19_bn
from dgc_training.config import Config, configs, derived

configs.model = Config(vgg19_bn, num_classes=derived("dataset.num_classes"))
# A tenth of the others': at 0.1 the loss rises at first, and is slow to come down.
configs.train.optimizer.lr = 0.01  # for one rank
configs.train.optimizer.weight_decay = 5e-4
