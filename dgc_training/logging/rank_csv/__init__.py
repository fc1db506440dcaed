"""One CSV file per rank."""
