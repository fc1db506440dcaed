"""AlexNet for 32x32 images (Krizhevsky et al. 2012), 2,472,266 parameters.

The original has no such file. The paper gives the learning rate and the weight decay.
"""

from dgc_models import alexnet
from dgc_training.config import Config, configs, derived

configs.model = Config(alexnet, num_classes=derived("dataset.num_classes"))
# A tenth of the other models' rate. Without batch norm the loss diverges at 0.1.
configs.train.optimizer.lr = 0.01  # for one rank
configs.train.optimizer.weight_decay = 5e-4
