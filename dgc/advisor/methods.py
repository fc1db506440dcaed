"""The methods that the advisor compares, and how the optimizer of each is made in Python.

docs/methods.md says which optimizer goes with which method. The table has what trains badly, and why, and what
each method lost with Adam and Muon, as measured.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dgc import compression, gossip
from dgc.comm import Transport
from dgc.optim import (
    DGCSGD,
    DGCAdam,
    DistributedOptimizer,
    LocalOptimizer,
    MuonWithAdamW,
    OneBitAdam,
    Wrapper,
    muon_groups,
)

Build = Callable[[nn.Module, Transport], Wrapper]  # the optimizer of a method, in the phase that is predicted


@dataclass(frozen=True)
class Loss:
    """What a method lost to dense training with the same optimizer at equal steps, as measured on one task.

    Attributes:
        percent: Bits per character minus dense training's, mean over the runs. Below 0: it ended lower.
        error: Its standard error. None: it is not known, as of one run.
        task: The model and the steps.
        source: The page and section that has the number and its command.
    """

    percent: float
    error: float | None
    task: str
    source: str

    @property
    def at_most(self) -> float:
        """Two standard errors above the mean."""
        return self.percent + 2 * (self.error or 0.0)

    @property
    def amount(self) -> str:
        """Three digits at most, as on the pages."""
        return f"{self.percent:.{self._digits}f} %"

    @property
    def _digits(self) -> int:
        return 2 if abs(self.percent) < 1 else 1

    def __str__(self) -> str:
        digits = 2 if self.error is not None and self.error < 0.1 else self._digits
        error = "" if self.error is None else f" ({self.error:.{digits}f})"
        return f"{self.amount}{error} {self.task}"


@dataclass(frozen=True)
class Method:
    """A row of the advisor's table.

    Attributes:
        name: Its name.
        usage: Words that ask for it: a constructor in Python or, for train.py, config files after an experiment.
        corrects_momentum: Whether it applies the momentum of SGD before compression, in place of the optimizer.
        is_low_rank: Whether its bytes grow with the sides of a matrix, and not with its elements.
        averages_models: Whether each rank trains a model of its own, which it averages with others.
        for_adam: Whether it goes with Adam and AdamW only.
        not_with: Why it does not go with an optimizer, by its family. No entry: it does.
        lost_with: What it lost, by the optimizer's family. No entry: it was not measured with this family.
        dense_share: Share of the steps of a run in which it sends dense gradients, before it compresses.
        note: What the bytes of its row depend on.
    """

    name: str
    usage: tuple[str, ...] = ()
    corrects_momentum: bool = False
    is_low_rank: bool = False
    averages_models: bool = False
    for_adam: bool = False
    not_with: Mapping[str, str] = field(default_factory=dict)
    lost_with: Mapping[str, tuple[Loss, ...]] = field(default_factory=dict)
    dense_share: float = 0.0
    note: str = ""


HALVES = ("fp16", "bf16", "bf16-two-phases")
UNCOMPRESSED = ("dense", *HALVES)  # what a method must be faster than
FAMILIES = {"sgd": "sgd", "adam": "adam", "adamw": "adam", "muon": "muon"}  # of optimizers, by the name of one
LIMITED = ("adam", "muon")  # families with which a method must be within the limit of --loss
SIZES = "its updates differ in size from step to step, and Adam divides by that"
ONE_SCALE = "one scale for a whole tensor replaces the second moments of its elements"
GPT, SHORT, LSTM = "GPT, 1000 steps", "GPT, 300 steps", "LSTM, 1000 steps"
TASKS, TWO_PHASES = "docs/language.md#methods-on-these-tasks", "docs/methods.md#two-phases"
MUON = "docs/methods.md#muon"
LOW_RANK = {
    "adam": (Loss(17.4, 0.6, f"rank 4, {GPT}", TASKS), Loss(6.5, 0.6, f"rank 4, {LSTM}", TASKS)),
    "muon": (Loss(12.2, None, f"rank 4, {GPT}", MUON),),
}
EIGHT_BITS = {
    "adam": (
        Loss(0.18, 0.04, GPT, TWO_PHASES),
        Loss(0.03, 0.03, SHORT, TWO_PHASES),
        Loss(-0.32, 0.30, LSTM, TWO_PHASES),
    ),
    "muon": (Loss(0.04, 0.16, SHORT, MUON),),
}
FOUR_BITS = {
    "adam": (
        Loss(0.39, 0.17, SHORT, TWO_PHASES),
        Loss(0.29, 0.14, GPT, TWO_PHASES),
        Loss(-0.01, 0.44, LSTM, TWO_PHASES),
    ),
    "muon": (Loss(3.9, 0.02, SHORT, MUON), Loss(0.18, None, GPT, MUON)),
}
ONE_BIT = {"adam": (Loss(5.3, 0.8, LSTM, TASKS), Loss(-1.1, 0.4, GPT, TASKS))}
LATE = {"adam": (Loss(8.5, 0.2, GPT, TASKS), Loss(7.3, 0.6, LSTM, TASKS))}


def with_adam(reason: str) -> dict[str, str]:
    """Why a method does not go with Adam, nor with Muon, which leaves embeddings to AdamW."""
    return {"adam": reason, "muon": f"embeddings are AdamW's, and {reason}"}


# The words are evaluated to build the method: what is printed is what was measured.
METHODS = (
    Method("dense", ("DenseCompressor()",)),
    Method("fp16", ("FP16Compressor()",)),
    Method("bf16", ("BF16Compressor()",), note="gathered: each rank sends to all others"),
    Method("bf16-two-phases", ("TwoPhaseCompressor(bits=16)",)),
    Method("dgc-fp32-int64", ("DGCCompressor(0.001)",), corrects_momentum=True),
    Method("dgc-fp16-packed", ('DGCCompressor(0.001, values="fp16", indices="packed")',), corrects_momentum=True),
    Method("dgc-sign-rice", ('DGCCompressor(0.001, values="sign", indices="rice")',), corrects_momentum=True),
    Method(
        "dgc-reduce-scatter",
        ('DGCCompressor(0.001, values="fp16", indices="int32", exchange="reduce_scatter")',),
        corrects_momentum=True,
    ),
    *(
        Method(
            f"powersgd-{rank}",
            (f"PowerSGDCompressor(rank={rank}, num_iters_per_step=2)",),
            is_low_rank=True,
            lost_with=LOW_RANK,
        )
        for rank in (1, 2, 4)
    ),
    Method("int8", ("TwoPhaseCompressor(bits=8)",), lost_with=EIGHT_BITS),
    Method("int4", ("TwoPhaseCompressor(bits=4)",), lost_with=FOUR_BITS),
    Method("2bit-adaptive", ("ThresholdCompressor(bits=2, threshold=None)",), not_with=with_adam(SIZES)),
    Method("scaled-sign", ("ScaledSignCompressor(error_feedback=True)",), not_with=with_adam(ONE_SCALE)),
    Method(
        "onebit-adam",
        ("OneBitAdamCompressor(FP16Compressor())",),
        for_adam=True,
        lost_with=ONE_BIT,
        dense_share=0.2,
    ),
    Method(
        "dgc-adam",
        ('DGCAdamCompressor(0.01, FP16Compressor(), indices="int32")',),
        for_adam=True,
        lost_with=LATE,
        dense_share=0.15,
    ),
    Method("sgp", ("SGP()",), averages_models=True),
    Method("sgp-fp16", ("SGP(message=HalfPrecisionMessage())",), averages_models=True),
)
NAMES = tuple(method.name for method in METHODS)
GOSSIP = tuple(method.name for method in METHODS if method.averages_models)


def unfit(method: Method, optimizer: str, family: str) -> str | None:
    """Why a method does not go with an optimizer. None: it does.

    Args:
        method: A row of METHODS.
        optimizer: Its name, for the message.
        family: One of FAMILIES.
    """
    if family != "sgd" and method.corrects_momentum:
        cure = ": dgc-adam takes its place" if family == "adam" else ""
        return f"with {optimizer}, momentum is not corrected{cure}"
    if method.for_adam and family != "adam":
        return f"it is for Adam and AdamW, and the optimizer is {optimizer}"
    return f"with {optimizer}, {method.not_with[family]}" if family in method.not_with else None


def within(method: Method, family: str, limit: float) -> bool:
    """Whether a method may be recommended: it is not compression, or lost at most `limit` percent on every task.

    Two standard errors are added to each loss. A method that was not measured is not within any limit.
    """
    if family not in LIMITED or method.name in UNCOMPRESSED:
        return True
    losses = method.lost_with.get(family, ())
    return bool(losses) and all(loss.at_most <= limit for loss in losses)


def builder(method: Method, optimizer: str, gradients: Mapping[str, Tensor]) -> Build:
    """The optimizer of a method for a script with the optimizer sgd, adam, adamw or muon. Collective if called.

    Args:
        method: A row of METHODS.
        optimizer: Its kind. The learning rate changes no byte.
        gradients: By the name of the parameter: of the dense steps that come first, if there are any.
    """
    (words,) = method.usage

    def build(model: nn.Module, transport: Transport) -> Wrapper:
        made: Any = eval(words, {**vars(compression), **vars(gossip)})
        parameters = [p for p in model.parameters() if p.requires_grad]
        inner: Optimizer
        if method.for_adam:
            inner = (OneBitAdam if method.name == "onebit-adam" else DGCAdam)(parameters, freeze_step=1)
        elif optimizer == "muon":
            inner = MuonWithAdamW(muon_groups(model, show=False))
        elif FAMILIES[optimizer] == "adam":
            inner = (torch.optim.Adam if optimizer == "adam" else torch.optim.AdamW)(parameters)
        else:
            kind = DGCSGD if method.corrects_momentum else torch.optim.SGD
            inner = kind(parameters, lr=0.1, momentum=0.9)
        after_dense_steps(inner, model, gradients)
        if method.averages_models:
            return LocalOptimizer(inner, model.named_parameters(), made, transport=transport)
        return DistributedOptimizer(
            inner, model.named_parameters(), compression=made, transport=transport, hierarchical="auto"
        )

    return build


def before_compression(optimizer: Optimizer) -> None:
    """Brings an optimizer back to the dense steps that come first."""
    for group in optimizer.param_groups:
        group["steps"] = 0


def after_dense_steps(inner: Optimizer, model: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Brings an optimizer that compresses only after dense steps behind these. It has `freeze_step`.

    One dense step with learning rate 0 takes their place, and gives it moments. The model does not change.
    """
    if "freeze_step" not in inner.defaults:
        return
    rates = [group["lr"] for group in inner.param_groups]
    for group in inner.param_groups:
        group.update(lr=0.0, freeze_step=1)
    for name, p in model.named_parameters():
        p.grad = gradients[name].clone() if name in gradients else None
    inner.step()
    model.zero_grad()
    for group, lr in zip(inner.param_groups, rates, strict=True):
        group["lr"] = lr
