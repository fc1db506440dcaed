"""Tasks: what a batch, a loss and an evaluation are. The training loop names none of them."""
