"""Gossip that sends compressed differences of models."""
