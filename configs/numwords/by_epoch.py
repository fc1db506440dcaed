"""A rate by epochs, for AD-PSGD, whose ranks have no steps in common. Stack it after the others of this folder."""

import torch

from dgc_training.config import Config, configs, derived

configs.train.schedule_lr_per_epoch = True
configs.train.warmup_lr_epochs = 1
configs.train.scheduler = Config(torch.optim.lr_scheduler.CosineAnnealingLR)
configs.train.scheduler.T_max = derived("train.num_epochs - train.warmup_lr_epochs")
