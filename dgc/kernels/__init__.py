"""The hot loops. `reference` is plain torch and defines what each operation means."""
