"""DenseNet-169 for 32x32 images (Huang et al. 2017, table 1), 12,493,322 parameters.

The original has no such file. Its other files and the paper have this weight decay.
"""

from dgc_models import densenet169
from dgc_training.config import Config, configs, derived

configs.model = Config(densenet169, num_classes=derived("dataset.num_classes"))
