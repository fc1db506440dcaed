"""The versions of torch that an adapter to one of torch's wrappers works with.

The adapters read names of torch that are private or young. Each adapter lists its own in one table, with the first
version that has them, and asks for them before training: otherwise another version would end a step with an
AttributeError. The range has the versions with which the adapter's tests were run (tools/torch_versions.sh).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


def minor_version(version: str) -> tuple[int, ...]:
    """(2, 13) of 2.13.0+cpu."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


@dataclass(frozen=True)
class TorchRange:
    """The versions of torch of one adapter.

    An older version is refused by its number, and a newer one only if it lacks a name.

    Args:
        adapter: Its name in dgc, for messages.
        oldest, newest: The versions between which its tests were run.
        since: For each name that it reads, the first version that has it, as far as that was read.
    """

    adapter: str
    oldest: str
    newest: str
    since: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"torch {self.oldest} to {self.newest}"

    def check_version(self) -> None:
        """Raise ImportError if torch is older than the range."""
        if minor_version(torch.__version__) < minor_version(self.oldest):
            self._refuse("")

    def check(self, owner: Any, names: Iterable[str]) -> None:
        """Raise ImportError if an object of torch lacks a name."""
        if missing := [name for name in names if not hasattr(owner, name)]:
            kind = owner.__name__ if hasattr(owner, "__name__") else type(owner).__name__
            self._refuse(f", whose {kind} has no {', '.join(missing)}")

    def _refuse(self, reason: str) -> None:
        raise ImportError(f"dgc.{self.adapter} works with {self}, and not with torch {torch.__version__}{reason}")
