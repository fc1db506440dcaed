"""Tasks: what a batch, its loss and an evaluation are. The training loop is the same for all of them."""
