"""Mutation tests: small faults in the source, drawn with a seed, of which the tests must detect most.

    python -m tools.mutants [--count N] [--seed N] [--package NAME] [--workers N] [--list] [--record FILE]

The operators of mutmut make the faults. Each one is applied in a temporary copy of the working tree, so the
checkout is never changed. The tests that run its lines follow, the fastest first, until one fails. Before the
faults, all tests run in the unchanged copy, which records the lines of each test. The exit status is 1 if fewer
than `LEAST` of the faults are detected.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests"))  # as pytest does, for `environment`
