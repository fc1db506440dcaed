"""The methods that are compared, each by its name on the command line, and the models."""

from collections.abc import Callable
from typing import Any

import torch

import dgc.kernels as kernels
import dgc_datasets.torchvision_compat  # noqa: F401  (before torchvision)
from dgc.bucket import Bucket
from dgc.comm.requests import Conversation
from dgc.compression import (
    BF16Compressor,
    ChunkCompressor,
    DenseCompressor,
    DGCCompressor,
    FP16Compressor,
    PowerSGDCompressor,
    ScaledSignCompressor,
    ThresholdCompressor,
)
from dgc.compression.protocol import Compressor, DenseResult, Reduced, StatelessCompressor
from dgc.gossip import DPSGD, SGP, Gossip, HalfPrecisionMessage
from dgc.kernels import PassInputs
from dgc.memory import DGCSGDMemory
from dgc.state import State, zeros
from dgc.wire import CastValues, PackedIndices, PlainIndices, RiceIndices, SignValues

MODELS = ("resnet18", "resnet50", "vgg16")


class Noop(StatelessCompressor):
    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        yield from ()
        return Reduced(DenseResult(is_finite=True), state)


class Update(Compressor):
    """The update of u and v of momentum correction, and nothing else: it sends nothing."""

    def init(self, bucket: Bucket, size: int, rank: int) -> State:
        return State(size, rank, errors={"v": zeros(bucket)}, local={"u": zeros(bucket)})

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        u, v = state.local["u"], state.errors["v"]
        kernels.of(v).selection.accumulate_(PassInputs(bucket.gradients, u, v, 0.9))
        yield from ()
        return Reduced(DenseResult(is_finite=True), state)


def dgc(ratio: float, **settings: Any) -> Compressor:
    return DGCCompressor(ratio, DGCSGDMemory(0.9), **settings)


METHODS: dict[str, Callable[[float], Compressor]] = {
    "noop": lambda ratio: Noop(),
    "update": lambda ratio: Update(),
    "dense": lambda ratio: DenseCompressor(),
    "fp16": lambda ratio: FP16Compressor(),
    "bf16": lambda ratio: BF16Compressor(),
    "dgc": lambda ratio: dgc(ratio),
    "dgc-fp16-int32": lambda ratio: dgc(ratio, fp16_values=True, int32_indices=True),
    "dgc-fp16-packed": lambda ratio: dgc(ratio, values=CastValues("fp16"), indices=PackedIndices()),
    "dgc-sign-rice": lambda ratio: dgc(ratio, values=SignValues(), indices=RiceIndices()),
    "dgc-sign-rice-dense-fp32": lambda ratio: dgc(
        ratio, values=SignValues(), indices=RiceIndices(), dense_values="fp32"
    ),
    "dgc-reduce-scatter": lambda ratio: dgc(ratio, exchange="reduce_scatter"),
    "dgc-gtopk": lambda ratio: dgc(ratio, exchange="gtopk"),
    "dgc-sampled": lambda ratio: dgc(ratio, sample_ratio=0.01, indices=PlainIndices("int32")),
    "chunks": lambda ratio: ChunkCompressor(ratio, DGCSGDMemory(0.9)),
    "powersgd": lambda ratio: PowerSGDCompressor(2),
    "powersgd-4": lambda ratio: PowerSGDCompressor(4),
    "sign": lambda ratio: ScaledSignCompressor(),
    "2bit": lambda ratio: ThresholdCompressor(),
}

# gossip sends the whole model to one neighbour: no compressor, and not a gradient
GOSSIP: dict[str, Callable[[], Gossip]] = {
    "sgp": lambda: SGP(),
    "sgp-fp16": lambda: SGP(message=HalfPrecisionMessage("fp16")),
    "dpsgd": lambda: DPSGD(),
}

HOROVOD = ("horovod", "horovod-fp16")
NAMES = (*METHODS, *GOSSIP, *HOROVOD)


def parameters_of(model: str) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters of a model of torchvision by name, all zero."""
    from torchvision import models

    with torch.device("meta"):
        shapes = {name: p.shape for name, p in models.get_model(model).named_parameters()}
    return [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
