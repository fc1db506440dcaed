"""Methods that send a few bits of every element."""
