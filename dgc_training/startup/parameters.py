"""Parameter groups of the optimizer."""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def parameter_groups(model: nn.Module, optimize_bn_separately: bool) -> list[dict[str, Any]]:
    """One group of all parameters or, with `optimize_bn_separately`, two groups.

    The second group has batch norm's parameters and no weight decay; the first has all others. Every parameter
    appears once, also if modules share it. A parameter shared with a batch norm belongs to batch norm's group. An
    empty group is left out.
    """
    if not optimize_bn_separately:
        return [{"params": list(model.parameters())}]
    normalization: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            normalization.update((id(parameter), parameter) for parameter in module.parameters(recurse=False))
    others = [parameter for parameter in model.parameters() if id(parameter) not in normalization]
    groups: list[dict[str, Any]] = [
        {"params": others},
        {"params": list(normalization.values()), "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
