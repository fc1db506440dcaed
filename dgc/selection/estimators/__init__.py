"""Selectors that estimate a threshold."""
