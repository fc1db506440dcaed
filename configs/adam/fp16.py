"""Gradients as fp16 in the steps that do not compress: after onebit_adam or dgc_adam, or contrib/zero_one_adam."""

from dgc.compression import FP16Compressor
from dgc_training.config import Config, configs

methods = (configs.train.local, configs.train.compression)
method = next((found for found in methods if "gradients" in (found or {})), None)
if method is None:
    raise ValueError(
        "the method stacked before has no steps that send gradients without compression: stack onebit_adam "
        "or dgc_adam of configs/adam, or configs/contrib/zero_one_adam, before this file; for plain Adam, use "
        "configs/dense/fp16.py"
    )
method.gradients = Config(FP16Compressor)
