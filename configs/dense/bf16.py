"""All-gather of bf16, summed in fp32 in rank order: the range of fp32, but bytes grow with the number of ranks."""

from dgc.compression import BF16Compressor
from dgc_training.config import Config, configs

configs.train.compression = Config(BF16Compressor)

configs.requires["train.compression._target_"] = configs.train.compression._target_
