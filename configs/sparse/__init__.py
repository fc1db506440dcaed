"""Sparse gradients with plain error feedback: one file per method, stacked after an experiment."""
