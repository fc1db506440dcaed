"""The three-layer LSTM of the PowerSGD study (Vogels et al. 2019, arXiv 1905.13727) on WikiText-2.

The study clips each rank's gradient at 0.4; train.clip_norm clips the averaged gradient.
"""

import torch

from dgc_models import LSTM
from dgc_training.config import Config, configs, derived

configs.task.carry_state = True

configs.model = Config(LSTM, vocabulary_size=derived("dataset.vocabulary_size"))
configs.model.width = 650
configs.model.layers = 3
configs.model.dropout = 0.4

configs.train.num_epochs = 90
configs.train.batch_size = 64

configs.train.optimizer = Config(torch.optim.SGD)
configs.train.optimizer.lr = 1.25  # for one rank
configs.train.optimizer.momentum = 0.0
configs.train.optimizer.weight_decay = 0.0
configs.train.clip_norm = 0.4

configs.train.warmup_lr_epochs = 5
# A tenth after 60 and 80 epochs. The scheduler counts epochs after the warm-up.
configs.train.scheduler = Config(torch.optim.lr_scheduler.MultiStepLR)
configs.train.scheduler.milestones = [derived(f"{epoch} - train.warmup_lr_epochs") for epoch in (60, 80)]
