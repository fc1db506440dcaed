"""Proof that the tests detect faults: each hand-written fault makes a named, small list of tests fail.

    python -m tests.mutants [--only NAME] [--room ROOM] [--list] [--workers N]

A fault replaces one short text in one file. It is applied in a temporary copy of the working tree, so the checkout
is never changed, and the native library is built again for a fault in C++. Before the faults, all named tests must
pass in the unchanged copy. The exit status is 1 if a fault survives, if its text is not found exactly once, or if
its tests end without a verdict, for example because they cannot be collected.
"""
