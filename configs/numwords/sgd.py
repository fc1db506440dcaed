"""SGD with momentum, which configs/dgc can correct, instead of Adam. Stack it after tiny.py or transformer.py."""

import torch

from dgc_training.config import Config, configs

configs.train.optimizer = Config(torch.optim.SGD)
configs.train.optimizer.lr = 0.1  # for one rank
configs.train.optimizer.momentum = 0.9
configs.train.optimizer.weight_decay = 0.0
configs.train.optimizer.nesterov = False
