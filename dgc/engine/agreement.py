"""Comparison of the settings of all ranks before training. Ranks with different settings diverge or deadlock.

`describe` returns a text for each setting by its path, such as `compression.rules[0].compressor.threshold`:

    numbers, strings, bools, None, dtypes     repr
    classes, functions, methods               qualified name, and the variables in a function's closure
    tuples, lists, dicts, sets                the elements
    tensors, arrays                           shape, dtype and a checksum of the content; no content for tensors
                                              that require a gradient (parameters), which may be broadcast later
    devices                                   type only: the number may differ between ranks
    random number generators, modules,
    optimizers, transports                    class only: the state may differ between ranks
    other objects                             class, all attributes including private ones, and plain class
                                              attributes; cached properties are left out
"""

import inspect
import re
import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor

from dgc.comm.collectives import all_gather_object, all_reduce, checked, with_checksum
from dgc.comm.conversation import Intact
from dgc.comm.requests import AllGather, as_bytes
from dgc.comm.transport import CrossMachineTransport, Transport

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, Enum)
QUALIFIED = (type, FunctionType, BuiltinFunctionType)
PER_RANK = (torch.Generator, torch.nn.Module, torch.optim.Optimizer, Transport)
ABSENT = "missing"
MAX_IN_FLIGHT = 64  # exchanges of all optimizers of a transport
DIGEST = struct.Struct("<II")  # crc32 of the optimizer and of the settings


def describe(**settings: object) -> dict[str, str]:
    """Return a text for each setting and each of its parts, by path. Paths begin with the keywords."""
    return {path: text for name, value in settings.items() for path, text in _walk(value, name, ())}


def check_equal(tensor: Tensor, transport: Transport, name: str, what: str, cure: str) -> None:
    """Raise ValueError on every rank if a tensor has other values on another rank. Collective.

    name: of the messages. what, cure: the tensor, and what to do, for the error.
    """
    digests = all_gather_object(transport, checksum(tensor), name)
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise ValueError(f"rank {rank} has another {what} than rank 0: {cure}")


def check_settings(transport: Transport, name: str, **settings: object) -> None:
    """Compare the settings of all ranks with the settings of this one. Collective. name: of the messages.

    Raises:
        ValueError: A setting differs. Raised on every rank, with the first such setting, both values and ranks.
    """
    own = describe(**settings)
    digest = crc32(repr(own).encode())
    digests = torch.tensor([digest, -digest], dtype=torch.int64)
    largest = all_reduce(transport, digests, "max", f"{name}.digest").tolist()
    if largest == [digest, -digest]:
        return
    _raise_first_difference(all_gather_object(transport, own, name), "every rank needs the same settings")


@dataclass
class _Sequence:
    """The exchanges of a transport: optimizers by crc32 of their names, number of exchanges, those in flight."""

    optimizers: dict[int, str] = field(default_factory=dict)
    exchanges: int = 0
    pending: "list[Agreement]" = field(default_factory=list)


_sequences: WeakKeyDictionary[Transport, _Sequence] = WeakKeyDictionary()


class Agreement:
    """Compares numbers that may change during training, in each exchange and without a round of their own.

    The messages of all exchanges on a transport have one order, whatever optimizer they are of. Ranks that step
    two optimizers in different orders therefore get an error, and do not wait for each other.

    Args:
        transport: Connects the ranks.
        optimizer: Name of the optimizer, unique on the transport.
        what: The exchange, for errors.
        cure: What to do about a difference, for errors.

    Example:
        >>> from dgc.engine.agreement import Agreement
        >>> rates = Agreement(transport, "a", "an exchange of models", "use the same lr on every rank")
        >>> with rates.exchange():
        ...     rates.begin(lr=0.1)  # before the exchange begins
        ...     rates.end()  # before this rank waits for anything else of it
    """

    def __init__(self, transport: Transport, optimizer: str, what: str, cure: str):
        self._transport, self._what, self._cure = transport, what, cure
        root = transport.inner if isinstance(transport, CrossMachineTransport) else transport
        self._sequence = _sequences.setdefault(root, _Sequence())
        self._optimizer = crc32(optimizer.encode())
        self._sequence.optimizers[self._optimizer] = optimizer
        self._own: dict[str, str] = {}
        self._work: Any = None
        self._intact = Intact()

    def exchange(self) -> Intact:
        """Context of all that begins, continues or ends an exchange. After an error it refuses further use."""
        return self._intact

    def begin(self, **settings: object) -> None:
        """Send a digest of the settings of this rank, 12 bytes with their checksum, which are not metered."""
        self._own = describe(**settings)
        digest = DIGEST.pack(self._optimizer, crc32(repr(self._own).encode()))
        # Horovod negotiates each new name, and refuses a name that is in flight
        name = f"dgc.agreement.{self._sequence.exchanges % MAX_IN_FLIGHT}"
        self._sequence.exchanges += 1
        self._work = self._transport.launch(name, (AllGather(with_checksum(digest)),))
        self._sequence.pending.append(self)

    def end(self) -> None:
        """Wait for the digests, also the digests of exchanges that began before and have not ended.

        Raises:
            ValueError: A setting differs. Raised on every rank, with the first one, both values and ranks.
        """
        while self in self._sequence.pending:
            self._sequence.pending.pop(0)._compare()

    def _compare(self) -> None:
        with self.exchange():
            (replies,) = self._transport.wait(self._work)
            cure = f"in {self._what}, {self._cure}"
            digests = [DIGEST.unpack(checked(reply, rank, "a digest")) for rank, reply in enumerate(replies)]
            # no further message: ranks that step other optimizers may not expect it
            optimizers = self._sequence.optimizers
            _raise_first_difference([{"optimizer": optimizers.get(crc, "unknown")} for crc, _ in digests], cure)
            if any(digest != digests[0] for digest in digests):
                _raise_first_difference(all_gather_object(self._transport, self._own, "agreement"), cure)


def _raise_first_difference(found: Sequence[dict[str, str]], cure: str) -> None:
    """Raise ValueError for the first setting that differs between ranks. found: by rank, see `describe`."""
    first, *others = found
    for rank, other in enumerate(others, 1):
        for path in dict.fromkeys(chain(first, other)):
            a, b = first.get(path, ABSENT), other.get(path, ABSENT)
            if a != b:
                raise ValueError(f"{path} is {a} on rank 0 and {b} on rank {rank}: {cure}")


def _walk(obj: Any, path: str, outer: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(obj, PLAIN):
        yield path, repr(obj)
    elif isinstance(obj, QUALIFIED) and id(obj) not in outer:
        yield path, _name(obj)
        enclosed = inspect.getclosurevars(obj).nonlocals if isinstance(obj, FunctionType) else {}
        for label, part in enclosed.items():
            yield from _walk(part, f"{path}.{label}", (*outer, id(obj)))
    elif isinstance(obj, torch.device):
        yield path, obj.type
    elif isinstance(obj, torch.Tensor):
        contents = "" if obj.requires_grad else f", crc32 {checksum(obj)}"
        yield path, f"tensor of shape {tuple(obj.shape)}, {obj.dtype}{contents}"
    elif hasattr(obj, "tobytes") and hasattr(obj, "dtype"):
        yield path, f"array of shape {tuple(obj.shape)}, {obj.dtype}, crc32 {crc32(obj.tobytes())}"
    elif id(obj) in outer:
        yield path, "a reference to an enclosing object"
    elif isinstance(obj, PER_RANK):
        yield path, _name(type(obj))
    else:
        parts = _parts(obj)
        yield path, _name(type(obj)) if parts is not None else _repr(obj)
        for label, part in parts or ():
            yield from _walk(part, path + label, (*outer, id(obj)))


def _parts(obj: Any) -> list[tuple[str, Any]] | None:
    """Return (path suffix, value) for each part of an object, or None if it has no inspectable parts."""
    if isinstance(obj, Mapping):
        return [(f"[{_repr(key)}]", value) for key, value in obj.items()]
    if isinstance(obj, Sequence | Set):
        elements = sorted(map(_repr, obj)) if isinstance(obj, Set) else obj
        return [(f"[{i}]", value) for i, value in enumerate(elements)]
    if isinstance(obj, MethodType):
        return [(".__func__", obj.__func__), (".__self__", obj.__self__)]
    if isinstance(obj, partial):
        return [(".func", obj.func), (".args", obj.args), (".keywords", obj.keywords)]
    kinds = type(obj).__mro__
    declared = [vars(kind).get("__slots__", ()) for kind in kinds]
    slots = [name for names in declared for name in ((names,) if isinstance(names, str) else names)]
    slots = [name for name in slots if name[:2] != "__"]
    if not hasattr(obj, "__dict__") and not slots:
        return None
    own = dict(getattr(obj, "__dict__", {}))
    own |= {name: getattr(obj, name) for name in slots if hasattr(obj, name)}
    of_classes: dict[str, Any] = {}
    for kind in reversed(kinds):
        of_classes |= vars(kind)
    plain = {name: value for name, value in of_classes.items() if isinstance(value, PLAIN) and name[:2] != "__"}
    fixed = {name: value for name, value in own.items() if not isinstance(of_classes.get(name), cached_property)}
    # public attributes first, so that an error names a public one if possible
    named = sorted((plain | fixed).items(), key=lambda item: item[0].startswith("_"))
    return [(f".{name}", value) for name, value in named]


def checksum(tensor: torch.Tensor) -> int:
    """Return the crc32 of a tensor's content."""
    return crc32(as_bytes(tensor.detach().cpu().contiguous()).numpy().data)


def _repr(obj: object) -> str:
    """Return repr(obj) without addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(obj))


def _name(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"
