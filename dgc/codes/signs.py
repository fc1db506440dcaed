"""Compressors that send the sign of every element, and one magnitude of each tensor."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.core.arguments import checked
from dgc.core.bucket import Bucket
from dgc.core.error_feedback import AllGatherCompressor, Codes, join, split_all
from dgc.core.protocol import Use, Vector
from dgc.core.state import State

# of one scale for all elements of a tensor
SIGNS_WITH_ADAM = (
    "ruins Adam's step, whose second moments then hardly differ between elements, most of all for embeddings, see "
    "docs/methods.md#which-optimizer-goes-with-which-method"
)


class SignCompressor(AllGatherCompressor):
    """Base class. Codes: 4 bytes of scale for each tensor of d elements, then its signs, 4 ceil(d/32) bytes."""

    bits = 1
    scale: kernels.Scale

    @abstractmethod
    def scales(self, v: Vector, bounds: Int64[Tensor, "bounds"]) -> Float32[Tensor, "S"]: ...

    def code(self, bucket: Bucket, state: State) -> kernels.ElementCode:
        return kernels.ElementCode(kernels.Form.SIGNS, self.scale, bucket.bounds, 1)

    def nbytes(self, bucket: Bucket) -> int:
        return sum(4 + 4 * -(-s.numel // 32) for s in bucket.segments)

    def encode(self, bucket: Bucket, state: State, v: Vector) -> tuple[Codes, Vector]:
        return self.signs(bucket, v, self.error_feedback, state.scratch.get("errors"))

    def signs(self, bucket: Bucket, v: Vector, keep: bool, into: Vector | None = None) -> tuple[Codes, Vector]:
        """Returns (codes, v minus the decoded codes if `keep`)."""
        scales = self.scales(v, bucket.bounds)
        cuts = torch.zeros_like(scales)
        codes, kept = kernels.of(v).quantize.sign_encode(v, bucket.bounds, cuts, scales, keep, into)
        return join(scales, codes), kept

    def mean_(self, bucket: Bucket, state: State, codes: Sequence[Codes], mean: Vector) -> None:
        scales, signs = split_all(codes, len(bucket.segments))
        kernels.of(mean).quantize.sign_mean_(signs, bucket.bounds, scales.unbind(), None, state.size, mean)


@checked
class SignSGDCompressor(SignCompressor):
    """signSGD and Signum with majority vote (Bernstein, Wang, Azizzadenesheli, Anandkumar 2018, arXiv 1802.04434;
    Bernstein, Zhao, Azizzadenesheli, Anandkumar 2019, arXiv 1810.05291).

        signSGD   send sign(g);  result = sign(sum over ranks)
        Signum    m = beta m + (1 - beta) g;  send sign(m)

    The stored state is e = beta v with v = g + e: v equals m / (1 - beta) and has the signs of m. The result is
    -1, 0 (a tie) or 1 for every element, so learning rates must be much smaller than for SGD: the papers use 1e-4.

    Differences from the papers: An element of 0 votes as a negative one. If the whole tensor is 0 on a rank, that
    rank does not vote: its scale is 0, not 1.

    Not for embeddings: a row that never gets a gradient, such as the row of `padding_idx`, moves by the learning
    rate in every step in which another row of its tensor has one. Exchange embeddings dense, by a Route.

    Args:
        momentum (float): beta of Signum, in [0, 1); 0 is signSGD, which keeps no state.

    Raises:
        ValueError: if momentum is out of range.
    """

    unsuited: Mapping[Use, str] = {Use.ADAM: SIGNS_WITH_ADAM}

    scale = kernels.Scale.NONZERO

    def __init__(self, momentum: float = 0.0):
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is from 0 to below 1, not {momentum}")
        super().__init__(error_feedback=momentum > 0)
        self.momentum = momentum

    def scales(self, v: Vector, bounds: Int64[Tensor, "bounds"]) -> Float32[Tensor, "S"]:
        return (kernels.of(v).quantize.largest(v, bounds) > 0).float()

    def code(self, bucket: Bucket, state: State) -> kernels.ElementCode:
        return replace(super().code(bucket, state), momentum=self.momentum, majority=True)

    def encode(self, bucket: Bucket, state: State, v: Vector) -> tuple[Codes, Vector]:
        codes, nothing = self.signs(bucket, v, keep=False)
        if not self.error_feedback:
            return codes, nothing
        return codes, torch.mul(v, self.momentum, out=state.scratch.get("errors"))

    def mean_(self, bucket: Bucket, state: State, codes: Sequence[Codes], mean: Vector) -> None:
        """Writes the majority, the sign of the sum."""
        super().mean_(bucket, state, codes, mean)
        mean.sign_()


class ScaledSignCompressor(SignCompressor):
    """EF-signSGD: scaled signs with error feedback (Karimireddy, Rebjock, Stich, Jaggi 2019, arXiv 1901.09847,
    Algorithm 1; Sign+Norm in Vogels et al. 2019).

        p = g + e;  send (|p|_1 / d) sign(p) of each tensor of d elements;  e = p - what was sent

    Differences from the paper: e has the unit of gradients and is not scaled by the learning rate. An element of 0
    is sent as a negative one.

    Args: as `ErrorFeedbackCompressor`. The seed is not used.
    """

    unsuited: Mapping[Use, str] = {Use.ADAM: SIGNS_WITH_ADAM}

    scale = kernels.Scale.MEAN

    def scales(self, v: Vector, bounds: Int64[Tensor, "bounds"]) -> Float32[Tensor, "S"]:
        return (kernels.of(v).selection.moments(v, bounds).magnitudes / bounds.diff().clamp(min=1)).float()
