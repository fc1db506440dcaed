"""Language modelling of WikiText-2, word by word, from the three files in data/wikitext-2."""

from dgc_datasets import WikiText2
from dgc_training.config import Config, configs
from dgc_training.meters import Perplexity, TokenLoss
from dgc_training.tasks.language_model import LanguageModel

configs.dataset = Config(WikiText2)
configs.dataset.root = "data/wikitext-2"
configs.dataset.vocabulary_size = 33278  # all words

configs.task = Config(LanguageModel)
configs.task.context = 30  # words of a row in one backward pass
configs.task.carry_state = False  # True: a model with a state, which is carried from batch to batch
configs.task.steps_per_epoch = None  # one pass over the data
configs.task.evaluation_rows = 32  # rows that the test words are divided into, over all ranks

configs.train.meters = {"perplexity/{}": Config(Perplexity), "loss/{}": Config(TokenLoss)}
configs.train.metric = "perplexity/val"
