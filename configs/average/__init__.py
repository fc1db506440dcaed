"""Periodic averages over all ranks. Between them, ranks gossip as stacked before, or train alone."""
