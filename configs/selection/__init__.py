"""Selectors: the elements that sparse compression sends. Stack one file after a file of `configs/dgc`."""

from dgc_training.config import configs

SPARSE = ("dgc.compression.DGCCompressor", "dgc.compression.SparseCompressor")

if configs.train.compression._target_ not in SPARSE:
    raise ValueError(
        "configs/selection chooses the elements that sparse compression sends, but train.compression is "
        f"{configs.train.compression._target_}; stack a file of configs/dgc before it, or configs/sparse/topk.py"
    )
if "sample_ratio" in configs.train.compression:
    configs.train.compression.sample_ratio = None  # the original's selector; a file of this folder replaces it
