"""Exchanges: how the elements that each rank has selected become the mean over all ranks."""
