"""One step of any method: buckets, the loop, two levels, saved states, agreement of the ranks."""
