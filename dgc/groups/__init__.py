"""Replica groups that come and go between outer steps."""
