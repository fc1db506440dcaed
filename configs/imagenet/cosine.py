"""Cosine schedule instead of steps. Stack it after a model, such as configs/imagenet/resnet50.py."""

import torch

from dgc_training.config import Config, configs, derived

configs.train.scheduler = Config(torch.optim.lr_scheduler.CosineAnnealingLR)
configs.train.scheduler.T_max = derived("max(1, train.num_epochs - train.warmup_lr_epochs)")
