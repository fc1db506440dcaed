"""WMT'16 English-German with the published settings of stochastic gradient push: 25K tokens per step on 8 ranks.

Prepare the text first: python -m dgc_datasets.translation.wmt16 --help. Assran et al.,
https://arxiv.org/abs/1811.10792, and Ott et al., Scaling Neural Machine Translation,
https://arxiv.org/abs/1806.00187. The settings are from the authors' job scripts, for 8 ranks. 400K tokens per
step: stack configs/wmt16/tokens400k.py.
"""

import torch

from dgc_datasets.translation import PADDING, ParallelText
from dgc_training.config import Config, configs, derived
from dgc_training.tasks.translation import Translation

configs.task = Config(Translation)
configs.task.beams = 4  # section 6.1 of Vaswani et al.
configs.task.length_penalty = 0.6
configs.task.num_samples = 8

configs.dataset = Config(ParallelText)
configs.dataset.root = "data/wmt16"
configs.dataset.source = "en"
configs.dataset.target = "de"
configs.dataset.vocabulary_size = 32_000
configs.dataset.max_length = 256

configs.train.batch_size = 3500  # tokens
configs.train.num_batches_per_step = 1

configs.train.criterion = Config(torch.nn.CrossEntropyLoss, ignore_index=PADDING, label_smoothing=0.1)
configs.train.meters = None
configs.train.metric = "translation/val_bleu"  # without files of val: test_bleu, or null

configs.train.optimizer = Config(torch.optim.Adam)
# For one rank and one batch: 8 ranks train at 5e-4, with any number of batches per step.
configs.train.optimizer.lr = derived("5e-4 / (8 * train.num_batches_per_step)")
configs.train.optimizer.betas = [0.9, 0.98]

configs.train.warmup_lr_epochs = 0
configs.train.schedule_lr_per_epoch = False
configs.train.scheduler = Config("dgc_training.schedule.inverse_square_root", warmup_steps=4000, start=2e-4)
