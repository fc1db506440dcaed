"""Muon with dense gradients."""
