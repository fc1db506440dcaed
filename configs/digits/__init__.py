"""Real handwritten digits, 8x8 pixels, from scikit-learn. Training takes minutes on two cores."""

import torch

from dgc_datasets import Digits
from dgc_training.config import Config, configs, derived

configs.dataset = Config(Digits)
configs.dataset.fold = 0  # which fold is the test set
configs.dataset.num_folds = 5  # 1437 or 1438 images to train on, 360 or 359 to test
configs.dataset.num_classes = 10

configs.train.num_epochs = 40
configs.train.batch_size = 32

configs.train.optimizer = Config(torch.optim.SGD)
configs.train.optimizer.lr = 0.025  # for one rank; 4 ranks train at 0.1
configs.train.optimizer.momentum = 0.9
configs.train.optimizer.weight_decay = 1e-4
configs.train.optimizer.nesterov = False

# Derived from num_epochs and the warm-up, wherever they are set. At least 1, so that a very short run is possible.
configs.train.scheduler = Config(torch.optim.lr_scheduler.CosineAnnealingLR)
configs.train.scheduler.T_max = derived("max(1, train.num_epochs - train.warmup_lr_epochs)")
