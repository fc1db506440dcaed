"""Quantized gradients: one file per method, stacked after an experiment."""
