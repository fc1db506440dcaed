"""A small GPT with 421,376 parameters."""

import torch

from dgc_models import GPT
from dgc_training.config import Config, configs, derived
from dgc_training.schedule import warmup_cosine

configs.model = Config(GPT, vocabulary_size=derived("dataset.vocabulary_size"), context=derived("task.context"))
configs.model.width = 128
configs.model.layers = 2
configs.model.heads = 4
configs.model.dropout = 0.0

configs.train.num_epochs = 15
configs.train.batch_size = 16

configs.train.optimizer = Config(torch.optim.AdamW)
configs.train.optimizer.lr = 7.5e-4  # for one rank; 4 ranks train at 3e-3
configs.train.optimizer.betas = [0.9, 0.95]
configs.train.optimizer.weight_decay = 0.1
configs.train.clip_norm = 1.0

configs.train.schedule_lr_per_epoch = False
configs.train.scheduler = Config(warmup_cosine, warmup_steps=20, final=0.1)
configs.train.scheduler.total_steps = derived("train.num_epochs * task.steps_per_epoch")
