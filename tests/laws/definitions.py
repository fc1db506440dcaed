"""Rows of dgc/paper: the definitions keep the laws too."""

from collections.abc import Callable

from laws.table import Row

from dgc import paper
from dgc.bucket import Bucket


def pairs_and_flag(bucket: Bucket) -> int:
    """5 % of each tensor as fp32 values and int64 indices; the flag is an int64."""
    return 12 * sum(-(-s.numel // 20) for s in bucket.segments) + 8


def codes_and_flag(bits: int) -> Callable[[Bucket], int]:
    return lambda bucket: sum(4 * -(-s.numel * bits // 32) for s in bucket.segments) + 8


DEFINITIONS = [
    Row("paper-dgc", lambda: paper.DGC(0.05), pairs_and_flag, conserves=False, momentum=0.9),
    Row(
        "paper-dgc-zero-momentum",
        lambda: paper.DGC(0.05, momentum=0.0),
        pairs_and_flag,
        dense_limit=lambda: paper.DGC(1.0, momentum=0.0),
    ),
    Row("paper-ldte-bs", lambda: paper.LDTEBS(0.05), pairs_and_flag, dense_limit=lambda: paper.LDTEBS(1.0)),
    Row("paper-2bit", lambda: paper.Threshold(2, 2.0), codes_and_flag(2), feedback=True, one_element=False),
    Row(
        "paper-1bit",
        lambda: paper.Threshold(1, 0.0),
        codes_and_flag(1),
        feedback=True,
        one_element=False,
        at_zero=False,
        left=0.5,  # as the fast one: what stays beyond 1 can never be sent
    ),
]
