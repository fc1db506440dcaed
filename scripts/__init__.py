"""Launchers, reports and plots for the trainer. Run them as `python -m scripts.NAME` in the repository's root."""
