"""Detection of failures, and the end of a run after one."""
