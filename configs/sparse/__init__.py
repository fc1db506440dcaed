"""Sparse and low-rank gradients with plain error feedback: one file for each way, stacked after an experiment."""
