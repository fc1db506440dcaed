"""Selects the method of each tensor by rules. The first rule that matches is used."""
