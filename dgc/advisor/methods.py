"""The methods that the advisor compares, and how the optimizer of each is made in Python.

docs/methods.md says which optimizer goes with which method. The table has what trains badly, and why.
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
        behind_with: What it loses at equal steps on a small GPT, as measured, by the optimizer's family. No entry:
            at most 1 %.
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
    behind_with: Mapping[str, str] = field(default_factory=dict)
    dense_share: float = 0.0
    note: str = ""


HALVES = ("fp16", "bf16")
UNCOMPRESSED = ("dense", *HALVES)  # what a method must be faster than
FAMILIES = {"sgd": "sgd", "adam": "adam", "adamw": "adam", "muon": "muon"}  # of optimizers, by the name of one
SIZES = "its updates differ in size from step to step, and Adam divides by that"
ONE_SCALE = "one scale for a whole tensor replaces the second moments of its elements"
# bits per character of a GPT, to dense training with the same optimizer (docs/language.md, docs/methods.md)
LOW_RANK = {
    "adam": "17 % behind dense with rank 4 and a small GPT in 1000 steps, 6 % in 4000",
    "muon": "12 % behind dense with rank 4 and a small GPT in 1000 steps",
}
LATE = {"adam": "9 % behind dense with a small GPT in 1000 steps, 2 % in 4000"}


def with_adam(reason: str) -> dict[str, str]:
    """Why a method does not go with Adam, nor with Muon, which leaves embeddings to AdamW."""
    return {"adam": reason, "muon": f"embeddings are AdamW's, and {reason}"}


# The words are evaluated to build the method: what is printed is what was measured.
METHODS = (
    Method("dense", ("DenseCompressor()",)),
    Method("fp16", ("FP16Compressor()",)),
    Method("bf16", ("BF16Compressor()",), note="gathered: each rank sends to all others"),
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
            behind_with=LOW_RANK,
        )
        for rank in (1, 2, 4)
    ),
    Method("int8", ("TwoPhaseCompressor(bits=8)",)),
    Method("int4", ("TwoPhaseCompressor(bits=4)",), note="with Adam loses more than int8, most in short runs"),
    Method("2bit-adaptive", ("ThresholdCompressor(bits=2, threshold=None)",), not_with=with_adam(SIZES)),
    Method("scaled-sign", ("ScaledSignCompressor(error_feedback=True)",), not_with=with_adam(ONE_SCALE)),
    Method("onebit-adam", ("OneBitAdamCompressor(FP16Compressor())",), for_adam=True, dense_share=0.2),
    Method(
        "dgc-adam",
        ('DGCAdamCompressor(0.01, FP16Compressor(), indices="int32")',),
        for_adam=True,
        behind_with=LATE,
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
            inner = MuonWithAdamW(muon_groups(model))
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
