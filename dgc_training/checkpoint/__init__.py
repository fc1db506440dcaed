"""Checkpoints: files, contents, validation, and another number of ranks."""
