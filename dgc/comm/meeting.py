"""All ranks make one call, or an error names those that do not.

A collective that some ranks never call waits for them until the time limit of the network, half an hour, or is
mixed up with the next collective of the others. So rank 0 first receives a byte from every other rank. Where an
Exchange goes from rank to rank, each byte arrives by itself; over Horovod they arrive when all ranks have called.
"""

import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dgc.comm.requests import Exchange
from dgc.comm.transport import Transport
from dgc.warn import warn

WARN = 10.0  # seconds
LIMIT = 60.0  # seconds in which all ranks must call, if the transport was given no limit
LIMIT_OF_RANK_0 = 1800.0  # seconds: rank 0 may evaluate or read a file before, while the others wait
PAUSE = 0.005  # seconds
SHOWN = 8  # ranks in a message
LONGER = "If they need longer, pass a transport of dgc.comm.connect.connect(timeout=seconds)"

_unfinished: WeakKeyDictionary[Transport, dict[str, tuple[object, dict[int, Tensor]]]] = WeakKeyDictionary()


def meet(transport: Transport, call: str, advice: str) -> None:
    """Return when all ranks have called this function. Collective.

    Rank 0 waits `transport.timeout` seconds for the others, or 60 if that is None. They wait as long for rank 0,
    or 1800. A rank that has waited for 10 seconds warns. The same call may be made again after an error.

    Args:
        call: What the user has called, for example "gather_state()". The same on every rank.
        advice: The cure, for the message.

    Raises:
        RuntimeError: Some ranks have not called it. The message names them.
    """
    if transport.size == 1:
        return
    calls = _unfinished.setdefault(transport, {})
    if call not in calls:
        others = range(1, transport.size) if transport.rank == 0 else ()
        arrived = {rank: torch.zeros(1, dtype=torch.uint8) for rank in others}
        sends = {} if transport.rank == 0 else {0: torch.ones(1, dtype=torch.uint8)}
        calls[call] = transport.launch(f"dgc.control.meet.{call}", (Exchange(sends, arrived),)), arrived
    work, arrived = calls[call]
    begin, warned = time.monotonic(), False

    def message() -> str:
        missing = [rank for rank, mark in arrived.items() if not mark] if transport.rank == 0 else [0]
        return (
            f"rank {transport.rank} has called {call} and waited for {time.monotonic() - begin:.0f} seconds, "
            f"without an answer from {named(missing)}: every rank must call it. {advice}"
        )

    limit = transport.timeout
    if limit is None:
        limit = LIMIT if transport.rank == 0 else LIMIT_OF_RANK_0
    while not transport.poll(work):
        waited = time.monotonic() - begin
        if waited >= limit:
            raise RuntimeError(f"{message()}. {LONGER}")
        if waited >= WARN and not warned:
            warn(message())
            warned = True
        time.sleep(PAUSE)
    try:
        transport.wait(work)
    except RuntimeError as error:
        raise RuntimeError(f"{message()}. {error}") from error
    finally:
        del calls[call]


def named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:SHOWN]))}{more}"
