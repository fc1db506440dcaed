"""Quantized gradients: one file for each way, stacked after an experiment."""
