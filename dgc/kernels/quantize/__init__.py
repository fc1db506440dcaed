"""Encoding of every element of a buffer with a few bits."""
