"""Encoding of selections, values and headers as bytes."""
