"""Stochastic gradient push: the runs of its paper, their CSV files and its figures."""
