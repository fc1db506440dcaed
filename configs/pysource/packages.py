"""The sources of 20 packages beside the standard library, in bf16. Stack it after gpt.py."""

from dgc_datasets import PackageSources
from dgc_training.config import Config, configs

configs.dataset = Config(PackageSources)
configs.dataset.vocabulary_size = 128
configs.dataset.subwords = False
configs.dataset.test_tokens = 262144
configs.dataset.root = "data/package-sources"

configs.task.context = 128
configs.train.precision = "bf16"
