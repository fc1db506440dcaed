"""Pairs of ranks add and select again what their groups have selected. It needs messages from rank to rank."""

from dgc_training.config import configs

configs.train.compression.exchange = "gtopk"
