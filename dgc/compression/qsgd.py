"""QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic 2017, arXiv 1610.02132, section 3.1).

    Q(v_i) = |v|_2 sign(v_i) xi_i / L,  xi_i = floor(L |v_i| / |v|_2 + r_i),  r_i uniform in [0, 1)

in blocks, each with its own norm: unbiased, with a variance of at most min(d / L**2, sqrt(d) / L) |v|_2**2 for
blocks of d elements.

Differences from the paper: codes have a fixed number of bits, L = 2 ** (bits - 1) - 1 levels beside 0, in place of
Elias codes, whose length changes from step to step; norm = "max" scales by the largest magnitude, as the paper's
experiments do.
"""

from jaxtyping import Int64
from torch import Tensor

from dgc.compression.uniform import Uniform
from dgc.kernels import Moments

NORMS = ("l2", "max")


class QSGD(Uniform):
    """error_feedback: not the paper's; with norm "l2" and few levels it may diverge."""

    def __init__(
        self,
        bits: int = 4,
        block: int | None = 512,
        norm: str = "max",
        error_feedback: bool = False,
        seed: int = 0,
    ):
        if norm not in NORMS:
            raise ValueError(f"norm is one of {', '.join(NORMS)}, not {norm!r}")
        super().__init__(bits, 2 ** (bits - 1) - 1, block, True, error_feedback, seed)
        self.norm = norm

    def scales(self, moments: Moments, numels: Int64[Tensor, "S"]) -> Tensor:
        return moments.largest if self.norm == "max" else moments.squares.sqrt()
