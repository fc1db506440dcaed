"""Compressors that send some of the elements."""
