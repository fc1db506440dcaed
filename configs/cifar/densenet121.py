"""DenseNet-121 for 32x32 images (Huang et al. 2017, table 1), 6,956,298 parameters.

The original has no such file. Its other files and the paper have this weight decay.
"""

from dgc_models import densenet121
from dgc_training.config import Config, configs, derived

configs.model = Config(densenet121, num_classes=derived("dataset.num_classes"))
