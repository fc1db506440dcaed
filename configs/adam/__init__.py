"""AdamW for the experiment stacked before it, and methods that go with Adam. By itself: nothing is compressed."""

import torch

from dgc_training.config import Config, configs

configs.train.optimizer = Config(torch.optim.AdamW)
configs.train.optimizer.lr = 0.001  # for one rank
configs.train.optimizer.weight_decay = 0.01  # of the weights themselves, not of the gradients

configs.requires["train.dgc"] = False  # momentum before compression is not for Adam
