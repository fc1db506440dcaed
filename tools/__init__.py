"""What only maintainers run, in the repository's root. No wheel has it."""
