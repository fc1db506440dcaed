"""MSTopk (Shi et al.: MLSys 2021, "Towards Scalable Distributed Training of Deep Learning on Public Cloud
Clusters", arXiv 2010.10458).

N times, with l = 0, r = 1:
    q = (l + r) / 2;  t = mean|v| + q (max|v| - mean|v|);  c = #{|v| >= t}
    c <= k:  r = q        c > k:  l = q
The selection has exactly k elements: those above the last threshold with c <= k, and the remaining number from
between it and the last threshold with c > k.

Differences from the paper: The remaining elements are the largest in that range, not neighbours from a random
position, so the selection equals an exact top-k. The search ends early if c = k. If fewer than k elements reach
the mean, all elements are candidates.
"""

from dataclasses import dataclass

from dgc.arguments import checked
from dgc.selection.estimators.bisection import Bisection


@checked
@dataclass(frozen=True)
class MSTopk(Bisection):
    """MSTopk, a threshold search by bisection that selects exactly k elements (Shi et al. 2021, arXiv 2010.10458).

    Args:
        lower (float): smallest accepted count, as a multiple of k; see `Bisection`.
        upper (float): largest accepted count, as a multiple of k.
        passes (int): largest number of counts, N in the paper.

    Raises:
        ValueError: if an argument is out of range.
    """

    upper: float = 1.0
    passes: int = 30
