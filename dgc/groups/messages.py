"""The messages between a member and the coordinator, as lines of JSON.

A *tag* (round, attempt) names a committed state of the run. Attempts have numbers of their own over all rounds, so
that two tags are equal only if they name the same state. The state before the first round is (0, 0).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

VERSION = 4  # also of what groups send each other


class Tag(NamedTuple):
    """A committed state: the number of its round, and of the attempt that was committed."""

    round: int
    attempt: int


START = Tag(0, 0)
# The committed states up to one, which is the last. The first ones may be left out.
Line: TypeAlias = tuple[Tag, ...]
Address: TypeAlias = tuple[str, int]  # where a rank listens
Addresses: TypeAlias = tuple[Address, ...]  # of the ranks of a group, by their place in it


# --- from a member --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The first message of a connection.

    Attributes:
        run: "" if the member has been in none.
        addresses: Of its ranks.
        tag, digest: The committed state that it has.
        settings: A digest of what must be equal in all members, such as the shapes of the model.
        version: Of the messages.
    """

    run: str
    addresses: Addresses
    tag: Tag
    digest: int
    settings: str = ""
    version: int = VERSION


@dataclass(frozen=True)
class Beat:
    """The member exists."""


@dataclass(frozen=True)
class Has(Beat):
    """The member has the state of `tag` now."""

    tag: Tag
    digest: int


@dataclass(frozen=True)
class Ready:
    """The member has reached its outer step.

    Attributes:
        number: Of this message.
        only_heals: It asks for nothing but the last committed state, which it may have already.
        weight: Of its progress since its last round, as a number of samples or tokens. All 1: groups count alike.
    """

    number: int
    only_heals: bool = False
    weight: int = 1


@dataclass(frozen=True)
class Leave:
    """The member waits no longer, and trains on."""


@dataclass(frozen=True)
class Prepared:
    """The member has the means of an attempt, and waits for the decision. digest: of state and means."""

    tag: Tag
    digest: int


@dataclass(frozen=True)
class Failed:
    """The exchange of an attempt has failed. suspects: members that were not reached."""

    tag: Tag
    suspects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ask:
    """What was decided about an attempt?"""

    tag: Tag


# --- from the coordinator -------------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome:
    """The answer to Hello. grace, timeout: settings of the coordinator, in seconds."""

    run: str
    grace: float
    timeout: float


@dataclass(frozen=True)
class Refused:
    """The member cannot take part. reason: "" if it was declared dead, and need only connect again."""

    reason: str


@dataclass(frozen=True)
class Begin:
    """Exchange now.

    Attributes:
        ready: The number of the member's own Ready.
        members: Who exchanges, in this order.
        share: The member's weight, divided by the mean weight of all of them. Its progress is multiplied by it.
    """

    ready: int
    tag: Tag
    members: tuple[tuple[str, Addresses], ...]
    share: float = 1.0


@dataclass(frozen=True)
class Missed:
    """The member does not have the last committed state, `tag`: `source` has it."""

    ready: int
    tag: Tag
    source: str
    addresses: Addresses


@dataclass(frozen=True)
class GoOn:
    """There is no round for this Ready: train on."""

    ready: int
    reason: str


@dataclass(frozen=True)
class Commit:
    """The attempt counts: apply its means."""

    tag: Tag


@dataclass(frozen=True)
class Void:
    """The attempt does not count: nothing of it is applied."""

    tag: Tag


@dataclass(frozen=True)
class Unknown:
    """The coordinator has lost its file, and what it had decided about this attempt.

    The member may still learn it from the line of a state that it loads.
    """

    tag: Tag


FromMember: TypeAlias = Hello | Beat | Ready | Leave | Prepared | Failed | Ask
FromCoordinator: TypeAlias = Welcome | Refused | Begin | Missed | GoOn | Commit | Void | Unknown
Message: TypeAlias = FromMember | FromCoordinator

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (Hello, Beat, Has, Ready, Leave, Prepared, Failed, Ask)
    + (Welcome, Refused, Begin, Missed, GoOn, Commit, Void, Unknown)
}


def encode(message: Message) -> bytes:
    """A message as one line of JSON, without the end of the line."""
    content = {field.name: getattr(message, field.name) for field in fields(message)}
    return json.dumps({"kind": type(message).__name__, **content}).encode()


def decode(line: bytes) -> Message:
    """The message of a line.

    Raises:
        ValueError: It is no message, for example of another version.
    """
    try:
        content = json.loads(line)
        kind = _KINDS[content.pop("kind")]
        if not isinstance(content, Mapping) or content.keys() != {field.name for field in fields(kind)}:
            raise ValueError(f"{kind.__name__} has other fields")
        message = kind(**{name: _frozen(value) for name, value in content.items()})
        if "tag" in content:
            object.__setattr__(message, "tag", Tag(*map(int, content["tag"])))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no message of this version of dgc: {line[:200]!r} ({error})") from error
    return message


def _frozen(value: Any) -> Any:
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value
