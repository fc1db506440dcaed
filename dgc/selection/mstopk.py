"""MSTopk (Shi et al.: MLSys 2021, "Towards Scalable Distributed Training of Deep Learning on Public Cloud
Clusters", arXiv 2010.10458).

N times, with l = 0, r = 1:
    q = (l + r) / 2;  t = mean|v| + q (max|v| - mean|v|);  c = #{|v| >= t}
    c <= k:  r = q        c > k:  l = q
k elements exactly: those above the last threshold with c <= k, and as many as are left to take between it and the
last threshold with c > k.

Differences from the paper: these are the largest ones there, not neighbours from a random place, so the choice is
that of an exact top-k; the search ends early where c = k. Where fewer than k elements reach the mean, all elements
are candidates.
"""

from dataclasses import dataclass

from dgc.selection.bisection import Bisection


@dataclass(frozen=True)
class MSTopk(Bisection):
    """passes: the paper's N."""

    upper: float = 1.0
    passes: int = 30
