"""The exchange of a step's gradients."""
