"""Communication graphs and mixing weights."""
