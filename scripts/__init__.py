"""Launchers and tools around the trainer: `python -m scripts.NAME` from the repository's root."""
