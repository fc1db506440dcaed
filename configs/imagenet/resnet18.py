"""ResNet-18, 11,689,512 parameters, 64 images per rank. Blocks start as identities (Goyal et al. 2017, 5.1)."""

from dgc_training.config import Config, configs, derived

configs.model = Config("torchvision.models.resnet18", num_classes=derived("dataset.num_classes"))
configs.model.zero_init_residual = True

configs.train.batch_size = 64
configs.train.optimizer.lr = 0.025
