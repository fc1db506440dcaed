"""From the command line to a run directory."""
