"""The big Transformer, 209,125,376 parameters, of the published runs."""

from dgc_models import transformer_big
from dgc_training.config import Config, configs, derived

configs.model = Config(transformer_big, vocabulary=derived("dataset.vocabulary_size"))
configs.model.dropout = 0.3

configs.train.num_epochs = 10
