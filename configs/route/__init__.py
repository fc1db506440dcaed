"""Which method takes which tensor: the first rule that matches."""
