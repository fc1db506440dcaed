"""All-reduce in fp16. Gradients or sums beyond 65504 become inf, and every rank drops the step."""

from dgc.compression import FP16Compressor
from dgc_training.config import Config, configs

configs.train.compression = Config(FP16Compressor)

configs.requires["train.compression._target_"] = configs.train.compression._target_
