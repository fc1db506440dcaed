"""A Transformer of one layer with 125,184 parameters: 99 % exact match after some hundred steps."""

import torch

from dgc_models import Transformer
from dgc_training.config import Config, configs, derived

configs.model = Config(Transformer, vocabulary=derived("dataset.vocabulary_size"), pre_norm=True)
configs.model.width = 64
configs.model.heads = 4
configs.model.hidden = 256
configs.model.layers = 1
configs.model.dropout = 0.0
configs.model.max_length = 512

configs.train.num_epochs = 2
configs.train.batch_size = 1024  # tokens, about 70 pairs: 420 steps per epoch on one rank

configs.train.optimizer = Config(torch.optim.Adam)
configs.train.optimizer.lr = 0.005  # for one rank
configs.train.optimizer.betas = [0.9, 0.98]

configs.train.warmup_lr_epochs = 0
configs.train.schedule_lr_per_epoch = False
configs.train.scheduler = Config("dgc_training.schedule.inverse_square_root", warmup_steps=100)
