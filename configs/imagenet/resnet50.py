"""ResNet-50, 25,557,032 parameters. Blocks start as identities (Goyal et al. 2017, section 5.1); Nesterov.

Differences from the original: Nesterov momentum is also used in DGC's memory. The original lost it there.
"""

from dgc_training.config import Config, configs, derived

configs.model = Config("torchvision.models.resnet50", num_classes=derived("dataset.num_classes"))
configs.model.zero_init_residual = True

configs.train.optimizer.weight_decay = 1e-4
configs.train.optimizer.nesterov = True
configs.train.optimize_bn_separately = True
