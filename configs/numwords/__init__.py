"""Numbers below 10^6 translated from German words to English words: nothing to download, minutes on two cores."""

import torch

from dgc_datasets.translation import PADDING, NumberWords
from dgc_training.config import Config, configs
from dgc_training.tasks.translation import Translation

configs.task = Config(Translation)
configs.task.beams = 1  # of the search in evaluations; 1: greedy
configs.task.length_penalty = 0.6
configs.task.num_samples = 8  # translations that TensorBoard shows as text

configs.dataset = Config(NumberWords)
configs.dataset.root = "data/numwords"
configs.dataset.source = "de"  # languages as num2words names them
configs.dataset.target = "en"
configs.dataset.train_numbers = 30_000
configs.dataset.test_numbers = 2_000
configs.dataset.vocabulary_size = 128
configs.dataset.max_length = 128
configs.dataset.seed = 0

configs.train.criterion = Config(torch.nn.CrossEntropyLoss, ignore_index=PADDING, label_smoothing=0.1)
configs.train.meters = None
configs.train.metric = "translation/test_exact_match"
