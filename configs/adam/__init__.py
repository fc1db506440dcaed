"""Methods that go with Adam. By itself: AdamW, nothing is compressed.

An experiment that has Adam or AdamW keeps its optimizer and the settings of it. In others AdamW takes its place.
"""

import torch

from dgc_training.config import Config, configs

if configs.train.optimizer._target_ not in ("torch.optim.Adam", "torch.optim.AdamW"):
    configs.train.optimizer = Config(torch.optim.AdamW)
    configs.train.optimizer.lr = 0.001  # for one rank
    configs.train.optimizer.weight_decay = 0.01  # of the weights themselves, not of the gradients

configs.requires["train.dgc"] = False  # momentum before compression is not for Adam
