"""Steps of methods with a code for every element, to compare the backends that have kernels for whole steps."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from kernels import comparison

from dgc import compression, kernels
from dgc.comm.requests import AllGather, next_requests
from dgc.core.bucket import Bucket, lay_out
from dgc.core.results import DenseResult, explained, joined
from dgc.engine.state import BucketStates

METHODS = {
    "scaled signs": compression.ScaledSignCompressor,
    "signSGD": compression.SignSGDCompressor,
    "Signum": lambda: compression.SignSGDCompressor(0.9),
    "2 bits": lambda: compression.ThresholdCompressor(wire="gather"),
    "2 bits from the data": lambda: compression.ThresholdCompressor(2, None, 0.7, wire="gather"),
    "1 bit of MXNet": lambda: compression.ThresholdCompressor(1, 0.1, wire="gather"),
    "QSGD": compression.QSGDCompressor,
    "QSGD of the norm": lambda: compression.QSGDCompressor(8, None, "l2", error_feedback=True),
    "int8 blocks": compression.BlockwiseCompressor,
    "blocks of 2 bits": lambda: compression.BlockwiseCompressor(2, 50),
}
SHAPES = [(2, 70), (33,), (0, 5), (65,)]
NUMEL = 140 + 33 + 65


class Steps:
    """Steps of some ranks with one backend. `payloads` has what they have gathered."""

    def __init__(self, make: Any, backend: Any, ranks: int, dtype: Any, flat: bool, device: str = "cpu") -> None:
        tensors = [(str(i), torch.empty(shape, device="meta")) for i, shape in enumerate(SHAPES)]
        self.backend, self.flat = backend, flat
        self.buckets = [Bucket("b", lay_out(tensors), dtype, torch.device(device)) for _ in range(ranks)]
        self.states = [BucketStates(make()) for _ in range(ranks)]
        for rank, (states, bucket) in enumerate(zip(self.states, self.buckets, strict=True)):
            states.add(bucket, ranks, rank)
        self.payloads: list[Any] = []

    def step(self, gradients: Any, change: Any = lambda payloads: None) -> list[Any]:
        """Returns the results, what the buckets hold, and the residuals."""
        for bucket, gradient in zip(self.buckets, gradients, strict=True):
            if self.flat:
                bucket.flat.copy_(gradient)
            else:
                for i, s in enumerate(bucket.segments):
                    bucket.use_gradient(i, gradient[s.offset : s.offset + s.numel].to(bucket.dtype))
        talks = [states.reduce(bucket) for states, bucket in zip(self.states, self.buckets, strict=True)]
        replies, ended = list[Any]([None] * len(talks)), list[Any]()
        while not ended:
            requests: list[Any] = []
            for talk, reply in zip(talks, replies, strict=True):
                with patch.object(kernels, "_backend", lambda asked, device: self.backend):
                    try:
                        requests.append(next_requests(talk, reply)[0])
                    except StopIteration as stop:
                        ended.append(settled(stop.value))
            tensors = [request.tensor for request in requests]
            if requests and isinstance(requests[0], AllGather):
                self.payloads = list(torch.stack(tensors).unbind())
                change(self.payloads)
                replies = [(tuple(self.payloads),) for _ in talks]
            elif requests:
                replies = [(torch.stack(tensors).mean(0),) for _ in talks]
        errors = [error for states in self.states for error in states.errors()]
        return [ended, [bucket.flat.clone() for bucket in self.buckets], errors]


def settled(result: DenseResult) -> DenseResult:
    """What the engine makes of a result at the end of a step, where it reads what a device reports."""
    if not result.reports:
        return result
    reason = explained(result.reports, joined(result.reports, []).tolist())
    return replace(result, nonfinite=reason, reports=())


def gradients_of(ranks: int, step: int, device: str = "cpu") -> list[Any]:
    """Of few bits, so that sums of them and of their squares are exact in any order."""
    found = [(comparison.random(NUMEL, 10 * step + r, device) * 64).round() / 64 for r in range(ranks)]
    for gradient in found:
        gradient[140:173:2], gradient[141:173:2] = 0.0, -0.0
        gradient[180:220:7] *= 16
    if step == 2:
        found[-1][[200, 173]] = torch.tensor([float("nan"), float("inf")], device=device)
    return found
