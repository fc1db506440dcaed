"""One LSTM layer with tied weights, 559,232 parameters, by truncated back-propagation through time."""

import torch

from dgc_models import LSTM
from dgc_training.config import Config, configs, derived

configs.task.carry_state = True

configs.model = Config(LSTM, vocabulary_size=derived("dataset.vocabulary_size"))
configs.model.width = 256
configs.model.layers = 1
configs.model.dropout = 0.0

configs.train.num_epochs = 15
configs.train.batch_size = 32

configs.train.optimizer = Config(torch.optim.Adam)
configs.train.optimizer.lr = 1e-3  # for one rank; 4 ranks train at 4e-3
configs.train.clip_norm = 1.0
