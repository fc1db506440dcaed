"""The workloads of `benchmarks.gpu`: codecs, whole steps of methods without a network, and a training step."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor, nn

import dgc.kernels as kernels
from dgc.bucket import Bucket, Segment, lay_out
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.requests import AllGather, Conversation, next_requests
from dgc.compression import DGCCompressor
from dgc.compression.protocol import Compressor, Result
from dgc.engine.state import BucketStates
from dgc.kernels import Merged, SparseVector
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from dgc.selection import plan_selection
from dgc.wire import CastValues, Int8Values, PackedIndices, PlainIndices, RiceIndices, SignValues, SparseFormat
from dgc.wire.payload import PayloadPlan

FORMATS = {
    "fp16 values, int32 indices": SparseFormat(CastValues("fp16"), PlainIndices("int32")),
    "int8 values, packed indices": SparseFormat(Int8Values(), PackedIndices()),
    "sign values, Rice indices": SparseFormat(SignValues(), RiceIndices()),
}
Shapes = Sequence[tuple[int, ...]]


def random_gradients(buckets: Sequence[Shapes], seed: int, device: torch.device) -> list[Tensor]:
    """Return one flat tensor per bucket, with equal values on every device."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [sum(torch.Size(shape).numel() for shape in shapes) for shapes in buckets]
    return [torch.randn(size, generator=generator).to(device) for size in sizes]


class Codec:
    """Payloads of `ranks` ranks for one bucket, with different random elements for each rank."""

    def __init__(self, form: SparseFormat, numel: int, density: float, device: torch.device, ranks: int):
        self.form, self.numel = form, numel
        self.codec = kernels.of(torch.empty(0, device=device)).codec
        self.plan = plan_selection(lay_out([("a", torch.empty(numel, device="meta"))]), density, device)
        self.none = torch.full((), numel, dtype=torch.int64, device=device)
        self.payload = PayloadPlan(self.form, self.plan.per_tensor, numel)
        self.selections = [self._selection(rank, device) for rank in range(ranks)]
        self.payloads = [self._encode(selection) for selection in self.selections]
        self.parts = self.decode()

    def _selection(self, rank: int, device: torch.device) -> SparseVector:
        generator, k = torch.Generator().manual_seed(rank), self.plan.capacity
        indices = torch.randperm(self.numel, generator=generator)[:k].sort().values.int()
        values, count = torch.randn(k, generator=generator), torch.tensor(k, dtype=torch.int32)
        return SparseVector(indices.to(device), values.to(device), count.to(device))

    def _encode(self, selection: SparseVector) -> Tensor:
        return self.payload.encode(self.codec, selection, self.none).payload

    def encode(self) -> Tensor:
        return self._encode(self.selections[0])

    def decode(self) -> list[SparseVector]:
        return self.payload.decode(self.codec, self.payloads).wait()[0]

    def merge(self) -> Merged:
        return kernels.of(self.parts[0].values).selection.merge_mean(self.parts, len(self.parts), self.numel)


def alone(conversation: Conversation[Result]) -> Result:
    """Return the result with one rank: every request is answered at once with its own tensors."""
    try:
        requests = next_requests(conversation)
        while True:
            replies = [(r.tensor,) if isinstance(r, AllGather) else r.tensor for r in requests]  # type: ignore[union-attr]
            requests = next_requests(conversation, tuple(replies))
    except StopIteration as stop:
        result: Result = stop.value
        return result


class Whole:
    """A step of a compressor over all buckets: gradient in, mean and residual out."""

    def __init__(self, name: str, compressor: Compressor, buckets: Sequence[Shapes], device: torch.device):
        self.name, self.states = name, BucketStates(compressor)
        self.buckets = [
            Bucket(f"bucket{b}", self._segments(shapes), torch.float32, device) for b, shapes in enumerate(buckets)
        ]
        for bucket in self.buckets:
            self.states.add(bucket, 1, 0)

    @staticmethod
    def _segments(shapes: Shapes) -> tuple[Segment, ...]:
        return lay_out([(str(i), torch.empty(shape, device="meta")) for i, shape in enumerate(shapes)])

    def step(self, gradients: Sequence[Tensor]) -> list[Result]:
        for bucket, flat in zip(self.buckets, gradients, strict=True):
            for i, part in enumerate(flat.split([segment.numel for segment in bucket.segments])):
                bucket.use_gradient(i, part)
        return [alone(self.states.reduce(bucket)) for bucket in self.buckets]


class Training:
    """Forward, backward and step of a small network. Gradients are exchanged during backward."""

    def __init__(self, width: int, device: torch.device):
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device)
        self.x = torch.randn(32, width, generator=torch.Generator().manual_seed(0)).to(device)
        inner = DGCSGD(self.net.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
        self.optimizer = DistributedOptimizer(
            inner,
            self.net.named_parameters(),
            DGCCompressor(0.001, DGCSGDMemory(0.9)),
            bucket_mb=8 * width * width / 2**20,
            transport=LockstepWorld(1).transports[0],
        )

    @property
    def buckets(self) -> int:
        return len(self.optimizer.planned)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(self.x).square().mean().backward()
        self.optimizer.step()


def milliseconds(step: Callable[[], object], device: torch.device, rounds: int, warm_up: int = 3) -> float:
    """Return the median. The device is idle before each measurement."""
    times = []
    for number in range(-warm_up, rounds):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 0:
            times.append(1e3 * (time.perf_counter() - start))
    return median(times)
