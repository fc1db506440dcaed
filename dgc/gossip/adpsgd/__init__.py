"""Asynchronous averaging of pairs of ranks."""
