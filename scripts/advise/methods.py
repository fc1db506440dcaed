"""The methods of `dgc.advisor.methods` for experiments of train.py, with config files to stack.

To add a method, add its row there and one of `scripts.methods` that has files alone: they set `train.compression`,
or a synchronous `train.gossip` or `train.local`.
"""

from collections.abc import Mapping
from dataclasses import replace

from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from dgc.advisor import methods
from dgc.advisor.methods import Build, Method, after_dense_steps
from dgc.comm import Transport
from dgc.optim import Wrapper
from dgc_training.startup.build import build_as, config_errors, parameter_groups, wrap_optimizer
from scripts.methods import files_of

METHODS = tuple(replace(method, usage=files_of(method.name)) for method in methods.METHODS)
NAMES = methods.NAMES
FAMILIES = {"torch.optim.Adam": "adam", "torch.optim.AdamW": "adam", "dgc.optim.MuonWithAdamW": "muon"}


def family_of(optimizer: str) -> str:
    """The family of an experiment's optimizer, by its `_target_`."""
    return FAMILIES.get(optimizer, "sgd")


def unfit(method: Method, optimizer: str) -> str | None:
    """Why a method does not go with an experiment's optimizer, by its `_target_`. None: it does."""
    if method.corrects_momentum:
        return None  # its config files refuse an optimizer that it does not fit
    return methods.unfit(method, optimizer, family_of(optimizer))


def builder(tree: DictConfig, gradients: Mapping[str, Tensor]) -> Build:
    """The optimizer of a method as train.py makes it, in the phase of training that is predicted.

    Args:
        tree: The config of the experiment with the method's files.
        gradients: By parameter's name.
    """

    def build_wrapper(model: nn.Module, transport: Transport) -> Wrapper:
        settings = tree.train
        with config_errors():
            groups = parameter_groups(model, settings.optimize_bn_separately, settings.parameter_groups)
            inner = build_as(Optimizer, settings.optimizer, groups)
            after_dense_steps(inner, model, gradients)
            optimizer = wrap_optimizer(inner, model, settings, transport)
            optimizer.begin_epoch(settings.num_epochs - 1)  # after a warm-up of the ratio
        return optimizer

    return build_wrapper
