"""Checks that a loaded state has the structure of the one it replaces, and finite numbers.

The loaders of torch accept almost anything.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from torch import Tensor, zeros_like
from torch.optim import Optimizer

from dgc_training.schedule import Schedule


def check_structure(saved: Any, now: Any, where: str) -> None:
    """Raises ValueError, with the location, if keys, lengths, shapes or types of `saved` differ from `now`.

    An optional value always fits: None in `saved`, or anything where `now` has None.
    """
    if saved is None or now is None:
        return
    if isinstance(now, dict):
        if not isinstance(saved, dict) or saved.keys() != now.keys():
            found = sorted(map(str, saved)) if isinstance(saved, dict) else type(saved).__name__
            raise ValueError(f"{where} is {found}, not a mapping of {sorted(map(str, now))}")
        for key in now:
            check_structure(saved[key], now[key], f"{where}.{key}")
    elif isinstance(now, list | tuple):
        if not isinstance(saved, list | tuple) or len(saved) != len(now):
            raise ValueError(f"{where} is not a list of {len(now)}")
        for i, (a, b) in enumerate(zip(saved, now, strict=True)):
            check_structure(a, b, f"{where}.{i}")
    elif isinstance(now, Tensor):
        if not isinstance(saved, Tensor) or saved.shape != now.shape or saved.dtype != now.dtype:
            raise ValueError(f"{where} is not a tensor of shape {tuple(now.shape)} and type {now.dtype}")
        # A mask may contain inf from the start.
        if not bool((saved.isfinite() | ~now.isfinite().to(saved.device)).all()):
            raise ValueError(f"{where} has NaN or inf")
    elif isinstance(now, bool) or not isinstance(now, int | float):
        if type(saved) is not type(now):
            raise ValueError(f"{where} is of type {type(saved).__name__}, not {type(now).__name__}")
    elif isinstance(saved, bool) or not isinstance(saved, int | float):
        raise ValueError(f"{where} is of type {type(saved).__name__}, not a number")
    elif not isfinite(saved) and isfinite(now):
        raise ValueError(f"{where} is {saved}")


def check_tensors(saved: Any, now: Mapping[str, Any], where: str) -> None:
    """Applies `check_structure` to the tensors that both have. The model's own loader reports missing ones."""
    if not isinstance(saved, dict):
        raise ValueError(f"{where} is of type {type(saved).__name__}, not a mapping")
    for name in now.keys() & saved.keys():
        check_structure(saved[name], now[name], f"{where}.{name}")


def check_hyperparameters(saved: Any, optimizer: Optimizer, schedule: Schedule) -> None:
    """Raises ValueError if a setting of a parameter group differs from the config.

    The learning rate, and settings that the scheduler may change, are not compared. `saved` is an optimizer's
    state_dict that has passed `check_optimizer_state`.
    """
    settings = getattr(optimizer, "setting_names", optimizer.defaults.keys())
    for number, (group, now) in enumerate(zip(saved["param_groups"], optimizer.param_groups, strict=True)):
        for key in sorted(settings & now.keys() & group.keys() - {"lr"}):
            if group[key] != now[key] and not schedule.may_change(key):
                raise ValueError(
                    f"optimizer.param_groups.{number}.{key} is {group[key]!r}, and {now[key]!r} in the config"
                )


def check_optimizer_state(saved: Any, optimizer: Optimizer) -> None:
    """Raises ValueError if `saved` is not a state_dict of this optimizer, by group keys and buffer shapes."""
    now = optimizer.state_dict()
    if not isinstance(saved, dict) or saved.keys() != now.keys():
        raise ValueError("optimizer is not the state of an optimizer")
    check_structure(saved["param_groups"], now["param_groups"], "optimizer.param_groups")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not isinstance(saved["state"], dict):
        raise ValueError("optimizer.state is not a mapping")
    for number, buffers in saved["state"].items():
        where = f"optimizer.state.{number}"
        if type(number) is not int or not 0 <= number < len(parameters) or not isinstance(buffers, dict):
            raise ValueError(f"{where} is not the state of one of {len(parameters)} parameters")
        for name, value in buffers.items():
            plain = value is None or isinstance(value, bool | int | float)
            if isinstance(value, Tensor) and value.dim():
                check_structure(value, zeros_like(parameters[number]), f"{where}.{name}")
            elif type(name) is not str or not (plain or isinstance(value, Tensor)):
                raise ValueError(f"{where}.{name} is of type {type(value).__name__}")
            elif value is not None and not isfinite(value):
                raise ValueError(f"{where}.{name} is {float(value)}")
