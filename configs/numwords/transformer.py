"""A Transformer of two layers with 942,592 parameters."""

import torch

from dgc_models import Transformer
from dgc_training.config import Config, configs, derived

configs.model = Config(Transformer, vocabulary=derived("dataset.vocabulary_size"), pre_norm=True)
configs.model.width = 128
configs.model.heads = 4
configs.model.hidden = 512
configs.model.layers = 2
configs.model.dropout = 0.1
configs.model.max_length = 512

configs.train.num_epochs = 10
configs.train.batch_size = 2048  # tokens, about 140 pairs

configs.train.optimizer = Config(torch.optim.Adam)
configs.train.optimizer.lr = 0.002  # for one rank
configs.train.optimizer.betas = [0.9, 0.98]

configs.train.warmup_lr_epochs = 0
configs.train.schedule_lr_per_epoch = False
configs.train.scheduler = Config("dgc_training.schedule.inverse_square_root", warmup_steps=200)
