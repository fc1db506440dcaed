"""The transport of this process. Only the chosen one of Horovod and torch.distributed is imported."""

import os
import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

from dgc.comm.lockstep import LockstepWorld
from dgc.comm.transport import Transport
from dgc.launch import Choice, check_launcher, choose, end_with_launcher, torch_variables


def choose_transport(transport: str = "auto") -> Choice:
    """Choose a transport for this process, and check that it connects all ranks of the launcher.

    Args:
        transport: "horovod", "torch", or "auto": what is initialised already, Horovod before torch.distributed.
            Otherwise torchrun and srun mean torch.distributed, and all others Horovod, if it is installed.

    Raises:
        LaunchError: The transport does not understand the launcher, so each process would train a separate run.
        ValueError: `transport` is none of these.

    Example:
        >>> choose_transport("torch").transport
        'torch'
    """
    running = running_transports()
    choice = choose(transport, os.environ, find_spec("horovod") is not None, running[0] if running else None)
    if choice.transport not in running:
        check_launcher(os.environ, transport=choice.transport)
        if choice.transport == "torch":
            torch_variables(os.environ)
    return choice


def connect(
    transport: str = "auto",
    *,
    hierarchical: bool | str = False,
    timeout: float | None = None,
    point_to_point: bool = False,
) -> Transport:
    """Connect this process with the other ranks. From here on it ends when its launcher is killed.

    Args:
        transport: As in `choose_transport`.
        hierarchical: Create the `local` and `cross` groups as well. "auto": if there are several machines and one
            of them has several ranks. Must be the same on every rank.
        timeout: Seconds after which an operation that some ranks never joined ends the run. None: the default.
        point_to_point: Send an Exchange directly from rank to rank. Horovod needs MPI for it.

    Raises:
        LaunchError, ModuleNotFoundError: As in `choose_transport`, or Horovod is not installed.
        ValueError: An argument is invalid, or the transport cannot do `point_to_point`.

    Example:
        transport = connect()
        optimizer = DistributedOptimizer(optimizer, model.named_parameters(), transport=transport)
    """
    choice = choose_transport(transport)
    _end_with_launcher()
    if choice.transport == "torch":
        from dgc.comm import torch_distributed

        if "torch" not in running_transports():
            os.environ.update(torch_variables(os.environ))
        return torch_distributed.connect(hierarchical, timeout, point_to_point=point_to_point)
    if find_spec("horovod") is None:
        message = "Horovod is not installed: see page Installing of the documentation, or use the transport torch"
        raise ModuleNotFoundError(message, name="horovod")
    from dgc.comm import horovod

    return horovod.connect(hierarchical, timeout, point_to_point=point_to_point)


_connected: dict[tuple[str, bool], tuple[Transport, Any]] = {}  # with the default process group of that time


def default_transport(point_to_point: bool = False, transport: str = "auto") -> Transport:
    """Return the transport of this process, created once, and again after another init_process_group().

    Arguments and errors are the same as for `connect`.
    """
    key = choose_transport(transport).transport, point_to_point
    if key not in _connected or _connected[key][1] is not _default_group(key[0]):
        connected = connect(key[0], point_to_point=point_to_point)
        _connected[key] = connected, _default_group(key[0])
    return _connected[key][0]


def _default_group(transport: str) -> Any:
    """The default process group of torch.distributed. None: there is none, or another transport is used."""
    return sys.modules["torch.distributed"].group.WORLD if transport == "torch" else None


@cache
def process_set_transport(process_set: Any) -> Transport:
    """Return the transport of one of Horovod's process sets, created once. A rank outside of it is alone."""
    if choose_transport().transport != "horovod":
        raise ValueError("process_set needs Horovod, and torch.distributed connects the ranks: leave it out")
    if process_set.process_set_id is None:
        raise ValueError(f"Horovod does not know {process_set}: pass what hvd.add_process_set() returns")
    if process_set.process_set_id == 0:
        return default_transport()
    from dgc.comm import horovod

    horovod.meet_at_exit()
    return horovod.connect(process_set=process_set) if process_set.included() else LockstepWorld(1).transports[0]


@cache
def _end_with_launcher() -> None:
    end_with_launcher(os.environ)


def running_transports() -> list[str]:
    """The transports that are initialised in this process. Nothing is imported for it."""
    horovod, distributed = sys.modules.get("horovod.torch"), sys.modules.get("torch.distributed")
    found = ["horovod"] if horovod is not None and horovod.is_initialized() else []
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        found.append("torch")
    return found
