"""The optimizer of a config, in the phase of training that is predicted."""

from collections.abc import Mapping

from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from dgc_training.startup.build import build, parameter_groups


def build_inner(settings: DictConfig, model: nn.Module, gradients: Mapping[str, Tensor]) -> Optimizer:
    """Builds the optimizer that train.py would wrap.

    1-bit Adam and DGC for Adam compress only after dense steps. One with learning rate 0 takes the place of these,
    and gives the optimizer moments.

    Args:
        settings: `train` of the config.
        model: Its parameters stay as they are.
        gradients: By parameter's name.
    """
    inner: Optimizer = build(settings.optimizer, parameter_groups(model, settings.optimize_bn_separately))
    if "freeze_step" in inner.defaults:
        rates = [group["lr"] for group in inner.param_groups]
        for group in inner.param_groups:
            group.update(lr=0.0, freeze_step=1)
        for name, p in model.named_parameters():
            p.grad = gradients[name].clone() if name in gradients else None
        inner.step()
        model.zero_grad()
        for group, lr in zip(inner.param_groups, rates, strict=True):
            group["lr"] = lr
    return inner
