"""Selectors: the elements that DGC sends. There is one file per selector, stacked after one of `configs/dgc`."""

from dgc_training.config import configs

if configs.train.compression._target_ != "dgc.compression.DGCCompressor":
    raise ValueError(
        "configs/selection says what DGC sends, but train.compression is "
        f"{configs.train.compression._target_}; stack a file of configs/dgc before it"
    )
