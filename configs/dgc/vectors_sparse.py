"""Vectors are compressed too, at a ratio of their own."""

from dgc_training.config import configs

configs.train.compression.vectors = "sparse"
configs.train.compression.vector_ratio = 0.01  # share of a vector's elements that is sent; None: compress_ratio
