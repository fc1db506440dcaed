"""The methods that `benchmarks.selectors` compares: every selector in a DGC step."""

import torch
from torch import Tensor

import dgc.kernels as kernels
from benchmarks.recordings import MOMENTUM
from benchmarks.step_methods import Layout, Stateful
from dgc.kernels import PassInputs
from dgc.selection import (
    Bisection,
    Exact,
    Exponential,
    Gaussian,
    Histogram,
    Laplace,
    MSTopk,
    Predicted,
    Radix,
    Sampled,
    Selector,
    SelectorResult,
    Trimmed,
    plan_selection,
)
from dgc.wire import CastValues, PlainIndices, SparseFormat
from dgc.wire.payload import PayloadPlan

SELECTORS: dict[str, Selector] = {
    "radix": Radix(),
    "exact": Exact(),
    "histogram": Histogram(),
    "predicted": Predicted(),
    "sampled": Sampled(),
    "trimmed": Trimmed(),
    "bisection": Bisection(),
    "mstopk": MSTopk(),
    "laplace": Laplace(),
    "laplace-redsync": Laplace(stop="redsync"),
    "laplace-secant": Laplace(method="secant"),
    "laplace-warm": Laplace(warm_start=True),
    "exponential": Exponential(),
    "gaussian": Gaussian(),
}
# Table 3: how many times as fast as radixSelect.
PUBLISHED_AS = {"radix": 0, "sampled": 1, "trimmed": 2, "laplace": 3}
PUBLISHED = {
    "resnet101": (1.00, 1.54, 1.53, 1.62),
    "densenet169": (1.00, 0.98, 1.08, 1.18),
    "resnet50": (1.00, 1.48, 1.53, 1.55),
    "densenet121": (1.00, 0.84, 1.01, 1.12),
}
WIRE = SparseFormat(CastValues("fp16"), PlainIndices("int32"))


def published(model: str, method: str) -> float | None:
    return PUBLISHED[model][PUBLISHED_AS[method]] if model in PUBLISHED and method in PUBLISHED_AS else None


def needs_history(selector: Selector) -> bool:
    """Whether a first step differs from later ones."""
    return selector.remembers or isinstance(selector, Predicted)


class SelectorStep(Stateful):
    """A step: remove the previous step's sent elements from u and v; gradient in, payload out."""

    def __init__(self, name: str, buckets: Layout, ratio: float, device: str):
        super().__init__(buckets, device)
        self.name, self.selector = name, SELECTORS[name]
        self.plans = [plan_selection(bucket, ratio, torch.device(device)) for bucket in buckets]
        self.steps = 0
        self.pieces: dict[int, tuple[Tensor, ...]] = {}

    def step(self, gradients: list[Tensor]) -> None:
        for i, g in enumerate(gradients):
            self.send(i, self.select(i, g))
        self.steps += 1

    def select(self, i: int, g: Tensor) -> SelectorResult:
        """Do the step of bucket i with gradient g."""
        # a backward pass leaves one tensor per parameter, so splitting a buffer is not part of a step
        if g.data_ptr() not in self.pieces:
            self.pieces[g.data_ptr()] = g.split(self.sizes[i])
        u, v, pieces = self.u[i], self.v[i], self.pieces[g.data_ptr()]
        inputs = PassInputs(pieces, u, v, MOMENTUM, sent=self.sent[i], masking=True)
        return self.selector.select(inputs, self.plans[i], self.steps)

    def send(self, i: int, selected: SelectorResult) -> None:
        v, plan = self.v[i], self.plans[i]
        payload = PayloadPlan(WIRE, plan.per_tensor, v.numel())
        encoded = payload.encode(kernels.of(v).codec, selected.elements, selected.first_nonfinite)
        self.sent[i] = encoded.sent


class SelectAlone(Stateful):
    """The exact selection from an unchanged v."""

    name = "exact, select alone"

    def __init__(self, buckets: Layout, ratio: float, device: str):
        super().__init__(buckets, device)
        self.budget = [plan_selection(bucket, ratio, torch.device(device)).per_tensor for bucket in buckets]

    def step(self, gradients: list[Tensor]) -> None:
        for v, budget in zip(self.v, self.budget, strict=True):
            kernels.of(v).selection.select(v, budget)
