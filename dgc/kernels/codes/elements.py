"""Whole steps of the methods that send a code for every element, fused into a few launches of a GPU.

A payload is a header, a table of fp32 numbers per segment, and the codes of `Quantizers`, padded with zeros to a
multiple of 8 bytes. Where there is no `ElementCoder`, the methods build it from the operations of `Quantizers` and
`Codec`, which define its bits. Only the sums of `Moments` may differ, by the rounding of fp64.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from jaxtyping import Float32, Int32, Int64, UInt8
from torch import Tensor

from dgc.kernels.codes import WORD, Bounds, Dense, Each, Residual, layout_of
from dgc.kernels.payload import HEADER_BYTES, Terms

# Numbers of a checked payload, as int32: number, sealed, count, ratio, form.
WORDS = 5


class Scale(IntEnum):
    """The table's numbers for the elements v of a segment, or what a method sends in advance.

    NONE: no numbers. NONZERO: 1 if v has an element other than zero, else 0. MEAN: mean of |v|. LARGEST: largest
    |v|. NORM: L2 norm. SPREAD: `factor` times the root mean square.
    """

    NONE, NONZERO, MEAN, LARGEST, NORM, SPREAD = range(6)


class Form(IntEnum):
    """What the codes stand for.

    SIGNS: the scale with a sign. CUTS: 1 above the given cut, else -1. TERNARY: the
    given threshold with a sign, or zero. LEVELS: the code of `uniform_encode`.
    """

    SIGNS, CUTS, TERNARY, LEVELS = range(4)


@dataclass(frozen=True, eq=False)
class ElementCode:
    """The code of a bucket's elements.

    Attributes:
        form: What the codes stand for.
        scale: The table, if the form has one.
        bounds: First element of each segment with numbers of its own, and the end.
        bits: Bits per element.
        levels: Number of positive levels.
        factor: See `Scale`.
        random: Round stochastically.
        momentum: The residual is v times this. None: what is not sent.
        majority: The result is the sign of the mean.
    """

    form: Form
    scale: Scale
    bounds: Bounds
    bits: int
    levels: int = 1
    factor: float = 1.0
    random: bool = False
    momentum: float | None = None
    majority: bool = False

    @property
    def rows(self) -> int:
        """Numbers of a segment in the table."""
        return 0 if self.form in (Form.CUTS, Form.TERNARY) else 1

    @property
    def unit(self) -> int:
        """The codes of each segment take a multiple of so many bytes."""
        return WORD if self.form <= Form.TERNARY else 1

    @property
    def begin(self) -> int:
        """The first byte of the codes."""
        return HEADER_BYTES + 4 * self.rows * (self.bounds.numel() - 1)

    @property
    def nbytes(self) -> int:
        """Size of a payload."""
        return -(-(self.begin + layout_of(self.bounds, self.bits, self.unit).nbytes) // 8) * 8


@dataclass(frozen=True, eq=False)
class Measured:
    """What the first launch finds.

    Attributes:
        values: The numbers of each segment.
        unusable: Parts of the search for the gradient's first unusable element: positions, or larger numbers.
    """

    values: Float32[Tensor, "rows S"]
    unusable: Int32[Tensor, "parts"]


class ElementCoder(ABC):
    """Makes payloads from gradients in two launches, and the mean from all ranks' payloads in one or more."""

    def takes(self, code: ElementCode) -> bool:
        """Whether it has this code. All others are made from single operations."""
        return True

    @abstractmethod
    def measure_(self, code: ElementCode, g: tuple[Tensor, ...], v: Dense, adds: bool) -> Measured:
        """Compute v = v + g if `adds`, else v = g, as `accumulate_` and `assign_`, and the numbers of v."""

    @abstractmethod
    def encode(
        self,
        code: ElementCode,
        v: Dense,
        measured: Measured,
        given: Each | None,
        seed: int | None,
        keep: bool,
        tensors: Int64[Tensor, "bounds"],
        terms: Terms,
        into: Dense | None = None,
    ) -> tuple[UInt8[Tensor, "nbytes"], Residual]:
        """Encode v.

        given: The cut or threshold of each segment, if the form has them. tensors: Bounds of the tensors that the
        header counts. into: Another tensor like v, which takes the residual in place of new memory. Returns
        (payload, residual), which is empty unless `keep`.
        """

    @abstractmethod
    def mean_into_(
        self, flat: Tensor, code: ElementCode, payloads: Sequence[UInt8[Tensor, "nbytes"]], given: Each | None
    ) -> Int32[Tensor, "numbers"]:
        """Write the mean of all ranks' values into `flat` [n], of any float dtype.

        Returns WORDS numbers per payload, and whether the mean is finite. If a payload is not valid, the mean is
        undefined.
        """
