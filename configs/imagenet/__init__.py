"""ImageNet, the experiments of section 4.2: 90 epochs, 32 images per rank, a tenth at epochs 30, 60 and 80."""

import torch

from dgc_datasets import ImageNet
from dgc_training.config import Config, configs, derived

configs.dataset = Config(ImageNet)
configs.dataset.root = "data/imagenet"
configs.dataset.num_classes = 1000
configs.dataset.image_size = 224
configs.dataset.val_ratio = None  # a share of the training images to validate on: train.metric acc/val_top1

configs.data.num_workers = 4  # as in the original on a GPU; decoding is slower than training

configs.train.num_epochs = 90
configs.train.batch_size = 32

configs.train.optimizer = Config(torch.optim.SGD)
configs.train.optimizer.lr = 0.0125  # for one rank and 32 images; 8 ranks train at 0.1
configs.train.optimizer.momentum = 0.9
configs.train.optimizer.weight_decay = 5e-5

# The scheduler counts from the end of the warm-up.
configs.train.scheduler = Config(torch.optim.lr_scheduler.MultiStepLR)
configs.train.scheduler.milestones = [derived(f"{epoch} - train.warmup_lr_epochs") for epoch in (30, 60, 80)]
configs.train.scheduler.gamma = 0.1
