"""What functions on the ranks of a group return."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from dgc.core.bucket import as_real

Finding = dict[str, Any]


def digest(tensors: Iterable[Tensor]) -> str:
    parts = (as_real(tensor.detach()).float().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def told(act: Callable[[], Any], *kinds: type[Exception]) -> str:
    """The message of an error of one of these kinds, if there is one."""
    try:
        act()
    except kinds as error:
        return str(error)
    return ""


def refused(message: str, act: Callable[[], Any], *kinds: type[Exception]) -> None:
    """It raises a ValueError, or an error of one of these kinds, with these words."""
    found = told(act, *(kinds or (ValueError,)))
    assert message in found, (message, found)
