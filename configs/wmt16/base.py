"""The base Transformer, 60,522,496 parameters: the same settings, with the dropout of its paper."""

from dgc_models import transformer_base
from dgc_training.config import Config, configs, derived

configs.model = Config(transformer_base, vocabulary=derived("dataset.vocabulary_size"))
configs.model.dropout = 0.1

configs.train.num_epochs = 10
