"""Does compression pay on this network? `python -m scripts.advise` predicts the time of a step for each method."""
