"""The mean of all ranks' payloads of a bucket, decoded and added in one call where the kernels can.

They can for the formats of this package on a CPU. The sections of these have a `kind`. A format without one is
decoded by `SparseFormat.decode`. Both ways give the same bits and raise the same errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float32, UInt8
from torch import Tensor

from dgc.kernels.codec.mean import WORDS, Decoded, MeanDecoder, Sections
from dgc.kernels.selection.protocol import Budget, Merged
from dgc.wire.checks import check_sizes, refuse_invalid
from dgc.wire.payload import SparseFormat


def sections_of(form: SparseFormat, budget: Budget, numel: int) -> Sections | None:
    """Return the sections for a `MeanDecoder`, or None if it cannot decode a payload of this format."""
    layout = form.layout(budget, numel)
    indices, values = getattr(layout.indices, "kind", None), getattr(form.values, "kind", None)
    if indices is None or values is None:
        return None
    return Sections(indices, layout.indices.nbytes, values, budget.capacity, numel, layout.nbytes)


@dataclass(frozen=True, eq=False)
class Gathered:
    """The payloads of all ranks, in rank order.

    Attributes:
        payloads: One per rank.
        form: Their format.
        sections: Its `sections_of`.
        budget: Number of elements per tensor.
        size: Number of ranks.
        ratio: The ratio that this rank passed to `SparseFormat.encode`.
        what: Name of the payloads in errors.
    """

    payloads: Sequence[UInt8[Tensor, "nbytes"]]
    form: SparseFormat
    sections: Sections
    budget: Budget
    size: int
    ratio: float
    what: str

    def mean(self, decoder: MeanDecoder) -> tuple[Merged, list[int]]:
        """Return (mean, nonfinite): the mean over the ranks, and the numbers of `SparseFormat.decode`.

        Raises:
            PayloadError: See `SparseFormat.decode`.
        """
        payloads = self._checked()
        decoded, mean = decoder.mean(payloads, self.sections, self.budget.bounds, self.size)
        return mean, self._nonfinite(decoded)

    def mean_into_(self, dense: Float32[Tensor, "n"], decoder: MeanDecoder) -> tuple[bool, list[int]]:
        """Write the mean over the ranks. Returns (whether it is finite, the numbers of `SparseFormat.decode`).

        Raises:
            PayloadError: See `SparseFormat.decode`. The content of `dense` is then undefined.
        """
        payloads = self._checked()
        decoded = decoder.mean_into_(dense, payloads, self.sections, self.budget.bounds, self.size)
        return decoded.finite, self._nonfinite(decoded)

    def _checked(self) -> Sequence[Tensor]:
        check_sizes(self.payloads, self.sections.nbytes, self.form.terms(self.ratio), self.what)
        return [payload if payload.is_contiguous() else payload.contiguous() for payload in self.payloads]

    def _nonfinite(self, decoded: Decoded) -> list[int]:
        words: list[int] = decoded.words.tolist()
        terms, ranks = self.form.terms(self.ratio), range(len(self.payloads))
        refuse_invalid(words, ranks, self.budget, self.sections.numel, terms, self.what)
        assert decoded.valid, "a payload without a fault"
        return words[1::WORDS]
