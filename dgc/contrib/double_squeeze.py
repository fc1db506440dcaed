"""DoubleSqueeze with scaled signs: error compensation in both directions (Tang, Lian, Yu, Zhang, Liu 2019, arXiv
1905.05957, Algorithm 1).

    worker i     v = g_i + e_i

The servers, the payload and the codes come from `dgc.codes.chunked_signs`, which 1-bit Adam uses for its
momentum.

Differences from the paper: the servers compress the sum and not the mean, which changes their error by a factor of
N. Each piece has its own scale. There is no separate server.
"""

from collections.abc import Mapping
from typing import Any

from dgc.codes.chunked_signs import ChunkedSignsCompressor
from dgc.codes.signs import SIGNS_WITH_ADAM
from dgc.core.bucket import Bucket
from dgc.core.error_feedback import accumulated
from dgc.core.protocol import Position, Use, Vector


class DoubleSqueezeCompressor(ChunkedSignsCompressor):
    """Scaled signs to the servers and back, with error feedback in both directions (Tang et al. 2019, arXiv
    1905.05957, Algorithm 1). For the momentum of Adam in place of gradients: `OneBitAdamCompressor`.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = DistributedOptimizer(optimizer, model.named_parameters(), DoubleSqueezeCompressor())
    """

    unsuited: Mapping[Use, str] = {
        Use.ADAM: SIGNS_WITH_ADAM,
        Use.MUON: "loses much with Muon, which enlarges errors of its gradients, see docs/methods.md#muon",
    }

    def accumulate(self, bucket: Bucket, state: Any) -> tuple[Vector, Position]:
        return accumulated(bucket, state)
