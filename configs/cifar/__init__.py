"""CIFAR-10, the experiments of section 4.1: 200 epochs, 128 images per rank, cosine after the warm-up.

CIFAR-100: --configs.dataset.num_classes 100; its folder and the model's classes follow.
"""

import torch

from dgc_datasets import CIFAR
from dgc_training.config import Config, configs, derived

configs.dataset = Config(CIFAR)
configs.dataset.root = "data/cifar${dataset.num_classes}"
configs.dataset.num_classes = 10
configs.dataset.image_size = 32
configs.dataset.val_ratio = None  # a share of the training images to validate on: train.metric acc/val_top1
configs.dataset.download = False  # True: downloaded if it is missing

configs.train.num_epochs = 200
configs.train.batch_size = 128

configs.train.optimizer = Config(torch.optim.SGD)
configs.train.optimizer.lr = 0.1  # for one rank
configs.train.optimizer.momentum = 0.9
configs.train.optimizer.weight_decay = 1e-4

configs.train.scheduler = Config(torch.optim.lr_scheduler.CosineAnnealingLR)
configs.train.scheduler.T_max = derived("max(1, train.num_epochs - train.warmup_lr_epochs)")
