"""The published algorithms as their papers write them, in plain torch: what the fast ones are held to."""
