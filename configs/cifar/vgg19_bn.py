"""VGG-19 with batch norm for 32x32 images (Simonyan and Zisserman 2015, column E), 20,040,522 parameters.

The original has no such file. The paper gives the learning rate and the weight decay.
"""

from dgc_models import vgg19_bn
from dgc_training.config import Config, configs, derived

configs.model = Config(vgg19_bn, num_classes=derived("dataset.num_classes"))
# A tenth of the other models' rate. At 0.1 the loss rises at first and falls slowly.
configs.train.optimizer.lr = 0.01  # for one rank
configs.train.optimizer.weight_decay = 5e-4
