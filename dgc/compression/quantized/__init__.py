"""Compressors that send every element with a few bits."""
