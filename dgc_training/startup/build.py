"""Builds the parts of a run from its config. Errors of constructors become ConfigErrors."""

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from omegaconf import DictConfig
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from dgc.comm import Transport
from dgc.launch import LaunchError
from dgc.optim import DistributedOptimizer, LocalOptimizer, Wrapper
from dgc_training.config import ConfigError, instantiate
from dgc_training.constructors import of_kind


@contextmanager
def config_errors() -> Iterator[None]:
    """Context manager that turns a ValueError of any part into a ConfigError, which has no traceback."""
    try:
        yield
    except (ConfigError, LaunchError):
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"the run cannot be built from this config: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return f"{kind}{error} ({'/'.join(Path(place.filename).parts[-2:])}:{place.lineno})"


def build(node: Any, *args: Any) -> Any:
    """Calls `instantiate`. Any error of the constructor becomes a ConfigError with key, cause and location."""
    try:
        made = instantiate(node, *args)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{node._get_full_key(None)} ({node._target_}): {_cause(error)}") from error
    if made is None and node is not None:
        raise ConfigError(f"{node._get_full_key(None)} ({node._target_}): it gives None; has it no `return`?")
    return made


def build_as(kind: type[Any], node: Any, *args: Any) -> Any:
    """`build`, for a key whose constructor gives objects of one kind. Another object is a ConfigError."""
    return of_kind(kind, node, build(node, *args))


@runtime_checkable
class ExchangesModels(Protocol):
    """What an algorithm of train.local or train.gossip has."""

    needs_groups: bool
    is_synchronous: bool


def build_method(settings: DictConfig) -> Any:
    """What the config's `train` exchanges models with, `local` or `gossip`, or its compressor of gradients."""
    if node := settings.local or settings.gossip:
        return build_as(ExchangesModels, node)
    warnings.filterwarnings("ignore", "compress_ratio=.* is read as the factor saved")  # rank 0 prints it
    return build(settings.compression)


def open_transport(settings: DictConfig, method: Any, connect: Callable[..., Transport]) -> Transport:
    """Calls `connect` with what the method of `build_method` needs."""
    with config_errors():
        levels = {"on": True, "off": False}.get(settings.hierarchical, settings.hierarchical)
        models = bool(settings.local or settings.gossip)
        return connect(
            hierarchical=method.needs_groups if models else levels,
            timeout=settings.timeout,
            point_to_point=models or getattr(method, "point_to_point", False),
        )


def wrap_optimizer(
    optimizer: Optimizer,
    model: nn.Module,
    settings: DictConfig,
    transport: Transport,
    scaler: GradScaler | None = None,
    method: Any = None,
) -> Wrapper:
    """The distributed optimizer. It averages gradients or, with train.gossip or train.local, models.

    Args:
        scaler: scales the loss, if any. Averages of models have none.
        method: what `build_method` returns. None: it is built here.
    """
    method = build_method(settings) if method is None else method
    if settings.local or settings.gossip:
        in_steps = not settings.schedule_lr_per_epoch or settings.checkpoint_every is not None
        if in_steps and not method.is_synchronous:
            raise ValueError(
                f"with {type(method).__name__} ranks have no steps in common, only epochs: "
                "train.schedule_lr_per_epoch must be True and train.checkpoint_every null"
            )
        return LocalOptimizer(
            optimizer,
            model.named_parameters(),
            method,
            transport=transport,
            nonfinite=settings.nonfinite,
            groups=None if settings.groups is None else build(settings.groups),
        )
    return DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=method,
        backward_passes_per_step=settings.num_batches_per_step,
        op="average",
        bucket_mb=settings.bucket_mb,
        nonfinite=settings.nonfinite,
        transport=transport,
        hierarchical=settings.hierarchical,
        grad_scaler=scaler,
    )


@runtime_checkable
class Described(Protocol):
    """Parameter groups, or an optimizer, that say at the start of a run what they have chosen."""

    def description(self) -> str: ...


def parameter_groups(
    model: nn.Module, optimize_bn_separately: bool, made_by: DictConfig | None = None
) -> list[dict[str, Any]]:
    """What `made_by` makes of the model. None: one group of all parameters or, with `optimize_bn_separately`, two.

    The second group has batch norm's parameters and no weight decay; the first has all others. Every parameter
    appears once, also if modules share it. A parameter shared with a batch norm belongs to batch norm's group. An
    empty group is left out.
    """
    if made_by is not None:
        if optimize_bn_separately:
            raise ValueError("train.parameter_groups and train.optimize_bn_separately both make groups: use one")
        return cast(list[dict[str, Any]], build(made_by, model))
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
