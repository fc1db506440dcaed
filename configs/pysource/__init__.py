"""Language modelling, character by character, of the Python standard library's own sources."""

from dgc_datasets import PythonSources
from dgc_training.config import Config, configs
from dgc_training.meters import BitsPerToken, Perplexity, TokenLoss
from dgc_training.tasks.language_model import LanguageModel

configs.dataset = Config(PythonSources)
configs.dataset.vocabulary_size = 128  # characters; all others are one unknown character
configs.dataset.characters = None  # a number: only so many characters to train on, and a 20th of them to test

configs.task = Config(LanguageModel)
configs.task.context = 64  # characters of a row in one backward pass
configs.task.carry_state = False  # True: a model with a state, which is carried from batch to batch
configs.task.steps_per_epoch = 100  # optimizer steps between evaluations; null: one pass over the data
configs.task.evaluation_rows = 32  # rows that the test characters are divided into, over all ranks

configs.train.meters = {
    "bits_per_character/{}": Config(BitsPerToken),
    "perplexity/{}": Config(Perplexity),
    "loss/{}": Config(TokenLoss),
}
configs.train.metric = "bits_per_character/test"
configs.train.warmup_lr_epochs = 0
