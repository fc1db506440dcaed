"""Sparse and low-rank gradients with plain error feedback: one file per method, stacked after an experiment."""
