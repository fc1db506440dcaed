"""Asynchronous averaging in pairs."""
