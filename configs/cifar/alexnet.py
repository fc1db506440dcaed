"""AlexNet for 32x32 images (Krizhevsky et al. 2012), 2,472,266 parameters.

Not among the original's files; learning rate and weight decay are the paper's.
"""

from dgc_models import alexnet
from dgc_training.config import Config, configs, derived

configs.model = Config(alexnet, num_classes=derived("dataset.num_classes"))
# A tenth of the others': without batch norm, 0.1 makes the loss diverge.
configs.train.optimizer.lr = 0.01  # for one rank
configs.train.optimizer.weight_decay = 5e-4
