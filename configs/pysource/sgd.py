"""Plain SGD by the PowerSGD study (Vogels et al. 2019, arXiv 1905.13727) instead of Adam. Stack it after lstm.py.

The study's rates for its three-layer LSTM: a warm-up of 5 epochs, a tenth after two thirds and 8/9 of the epochs.
"""

import torch

from dgc_training.config import Config, configs, derived

configs.train.optimizer = Config(torch.optim.SGD)
configs.train.optimizer.lr = 1.25  # for one rank
configs.train.optimizer.momentum = 0.0
configs.train.optimizer.weight_decay = 0.0
configs.train.clip_norm = 0.4  # the study clips each rank's gradient; this is the norm of the averaged one

configs.train.warmup_lr_epochs = 5
# The scheduler counts epochs after the warm-up.
configs.train.scheduler = Config(torch.optim.lr_scheduler.MultiStepLR)
configs.train.scheduler.milestones = [
    derived(f"{share} * train.num_epochs // 9 - train.warmup_lr_epochs") for share in (6, 8)
]
