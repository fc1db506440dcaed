"""QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic 2017, arXiv 1610.02132, section 3.1).

    Q(v_i) = |v|_2 sign(v_i) xi_i / L,  xi_i = floor(L |v_i| / |v|_2 + r_i),  r_i uniform in [0, 1)

Each block has its own norm. The result is unbiased, with a variance of at most min(d / L**2, sqrt(d) / L) |v|_2**2
for blocks of d elements.

Differences from the paper: Codes have a fixed number of bits, with L = 2 ** (bits - 1) - 1 levels besides 0. The
paper uses Elias codes, which change in length from step to step. norm = "max" scales by the largest magnitude, as
in the paper's experiments.
"""

from jaxtyping import Int64
from torch import Tensor

from dgc.arguments import checked
from dgc.compression.quantized.uniform import UniformCompressor
from dgc.kernels import Moments

NORMS = ("l2", "max")


@checked
class QSGDCompressor(UniformCompressor):
    """Stochastic quantization (Alistarh et al. 2017, arXiv 1610.02132, section 3.1).

    Args:
        bits (int): bits per element with the sign: 2, 4 or 8.
        block (int, optional): elements that share a norm; None for one norm per tensor.
        norm (str): "max" as in the paper's experiments, or "l2" as in its analysis.
        error_feedback (bool): not in the paper; it may diverge with norm "l2" and few levels.
        seed (int): seed of the rounding.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> compression = QSGDCompressor(bits=4, block=512)
    """

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
