"""Compressors that send low-rank factors of matrices."""
