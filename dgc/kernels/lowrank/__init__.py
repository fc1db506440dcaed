"""Matrix products of low-rank compression."""
