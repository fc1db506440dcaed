"""The identity of a rank's state: whose it is, of which step, and of which settings.

Error state differs between ranks, but that of another rank has the same names and shapes. Loaded here, it would
replace what this rank has not sent, which is then lost, by what the other rank sends as well. States carry their
identity under the key `identity`, and every loader verifies it.
"""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

import torch

from dgc.arguments import checked
from dgc.comm.collectives import all_gather_object, all_reduce
from dgc.comm.transport import Transport

KEY = "identity"


class ErrorStatePart(TypedDict):
    """Which part of the error state a rank has, if the ranks of a machine divide it among them."""

    machine: int
    machines: int
    tensors: list[str]  # names of this rank's parameters
    others: list[str]  # names of those that other ranks of the machine have


@checked
@dataclass(frozen=True)
class Identity:
    """Whose state it is. All values are plain, so that `torch.load(weights_only=True)` reads them.

    Attributes:
        rank, size: The rank and the number of ranks. Of a model that FSDP2 shards inside machines, the machine and
            the number of machines.
        step: Number of steps so far, dropped ones included. None: ranks take different numbers of steps.
        shard, shards: Which shard of a machine's model it is of, and the number of shards.
        settings: Those that the meaning of the state depends on, by name.
    """

    rank: int
    size: int
    step: int | None
    shard: int = 0
    shards: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.shards == 1:
            return f"rank {self.rank} of {self.size}"
        return f"shard {self.shard} of {self.shards} on machine {self.rank} of {self.size}"


def identified(state: Mapping[str, Any], identity: Identity) -> dict[str, Any]:
    """Return the state with its identity."""
    return {**state, KEY: asdict(identity)}


def check_is_state(state: Any) -> None:
    """Raise ValueError for what is no state at all."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state must be what compression_state_dict() returned, not {state!r}")


def identity_of(state: Mapping[str, Any]) -> Identity | None:
    """Return the identity of a state. None: it was saved without one.

    Raises:
        ValueError: It is damaged.
    """
    saved = state.get(KEY)
    if saved is None:
        return None
    try:
        identity = Identity(**saved)
        if identity.step is None or 0 <= identity.step < 2**63:
            return identity
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{KEY} of the state is damaged: {saved!r}")


def verified(
    state: Mapping[str, Any], own: Identity, allow_other_rank: bool = False
) -> tuple[dict[str, Any], int | None]:
    """Check that a state belongs to this rank and fits its settings. Warns if it has no identity.

    Args:
        state: The saved state.
        own: The identity of this rank.
        allow_other_rank: Accept the state of another rank, or of another number of ranks. Never of another shard.

    Returns:
        The state without its identity, and its step, None if that is not known.

    Raises:
        ValueError: The state belongs elsewhere. The message names whose it is, and the cures.
    """
    check_is_state(state)
    identity = identity_of(state)
    content = {name: value for name, value in state.items() if name != KEY}
    if identity is None:
        if not allow_other_rank:
            warnings.warn(
                "this state does not say whose it is, because an earlier version saved it: make sure that it is "
                f"that of {own}",
                stacklevel=4,
            )
        return content, None
    if (identity.shard, identity.shards) != (own.shard, own.shards):
        raise ValueError(
            f"this state is that of {identity}, and {own} loads it: shards are different parts of the model. Load "
            "the state that this rank has saved, with the same number of ranks on each machine"
        )
    if (identity.rank, identity.size) != (own.rank, own.size) and not allow_other_rank:
        raise ValueError(
            f"this state is that of {identity}, and {own} loads it. What is not sent yet differs between ranks: "
            "that of this rank would be lost, and that of the other one sent twice. Save the state on every rank, "
            "into a file of its own, and load this rank's file. For another number of ranks, use "
            "dgc.optim.redistribute on the states of all ranks. allow_other_rank=True loads it nevertheless "
            "(docs/checkpoints.md)"
        )
    for name in sorted({*identity.settings, *own.settings}):
        saved, here = identity.settings.get(name), own.settings.get(name)
        if saved != here:
            raise ValueError(
                f"this state was saved with {name}={saved}, and here it is {here}: the state has another meaning "
                f"then. Use {saved}, or begin from the model alone, saved inside consensus()"
            )
    return content, identity.step


def compare_steps(transport: Transport, step: int) -> None:
    """Check that the states of all ranks are of one step. Collective.

    A rank that has loaded nothing is at step 0.

    Raises:
        ValueError: They are not. Raised on every rank, with the steps of all ranks.
    """
    name = "load_compression_state_dict_on_every_rank"  # shown where a rank waits for others
    both = torch.tensor([step, -step], dtype=torch.int64)
    if all_reduce(transport, both, "max", name).tolist() == [step, -step]:
        return
    ranks: dict[int, list[str]] = {}
    for rank, other in enumerate(all_gather_object(transport, step, f"{name}.steps")):
        ranks.setdefault(other, []).append(str(rank))
    found = "; ".join(
        f"{'ranks' if len(its) > 1 else 'rank'} {', '.join(its)}: step {other}" for other, its in ranks.items()
    )
    raise ValueError(
        f"the ranks have error states of different steps ({found}): load the states of one checkpoint on every "
        "rank. A rank that has loaded none is at step 0"
    )
