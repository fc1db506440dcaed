"""Redistributes the residual to another number of ranks, so that its mean over the ranks is unchanged.

Divide [0, 1) into one interval of length 1/old per old rank, and into one of length 1/new per new rank. New rank r
takes from old rank o the share w[r, o] = new * (length of their overlap):

    4 -> 1:  mean of all          1 -> 4:  each takes a full copy
    3 -> 2:  2/3 e0 + 1/3 e1,  1/3 e1 + 2/3 e2

Columns sum to new/old, so the mean over the new ranks equals the mean over the old ranks. Rows sum to 1, so no
rank begins with a larger residual than ranks had before, as it would if some states were scaled up. All updates
of error and momentum are linear, so the mean evolves as it would have on the old ranks. A new rank combines at
most ceil(old/new) + 1 old ranks, so a sparse residual stays about as sparse.

On two levels (`hierarchical`) the ranks of a machine divide one residual among them. Machines then take the
place of ranks: `merge` puts the parts of an old machine together, and `select` takes the part of a new rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from dgc.engine.state import KEY, Identity, ResidualPart, identified, identity_of


class FixedSize(ValueError):
    """The states of the ranks cannot be redistributed to another number of ranks."""


def shares(old_size: int, new_size: int, rank: int) -> dict[int, Fraction]:
    """Weight of each old rank in the state of new rank `rank`. Old ranks with weight 0 are left out."""
    weights = {}
    for old in range(old_size):
        begin = max(Fraction(rank, new_size), Fraction(old, old_size))
        end = min(Fraction(rank + 1, new_size), Fraction(old + 1, old_size))
        if end > begin:
            weights[old] = new_size * (end - begin)
    return weights


def blend(states: Mapping[int, Any], weights: Mapping[int, Fraction], where: str = "state") -> Any:
    """Weighted sum of nested states, as returned by `compression_state_dict`.

    Floating-point tensors are summed in float64 and rounded once. Values that are equal on all ranks (counters,
    shared factors) are kept. states, weights: by old rank. where: prefix of the key in error messages.

    Raises:
        ValueError: with the key, if values differ and cannot be summed.
    """
    parts = [states[rank] for rank in weights]
    first_part = parts[0]
    if any(type(part) is not type(first_part) for part in parts):
        raise ValueError(f"{where} has different types on the ranks that saved it")
    if isinstance(first_part, dict):
        if any(part.keys() != first_part.keys() for part in parts):
            raise ValueError(f"{where} has different keys on the ranks that saved it")
    if isinstance(first_part, list | tuple) and any(len(part) != len(first_part) for part in parts):
        raise ValueError(f"{where} has different lengths on the ranks that saved it")
    if isinstance(first_part, dict | list | tuple):
        keys = first_part if isinstance(first_part, dict) else range(len(first_part))
        own = {key: {rank: states[rank][key] for rank in weights} for key in keys}
        mixed = {key: blend(of_key, weights, f"{where}.{key}") for key, of_key in own.items()}
        return mixed if isinstance(first_part, dict) else type(first_part)(mixed.values())
    if isinstance(first_part, Tensor):
        return _blend_tensors(parts, [float(weight) for weight in weights.values()], where)
    if any(part != first_part for part in parts):
        raise ValueError(f"{where} differs between the ranks that saved it and is not a tensor: {parts}")
    return first_part


def merge(parts: Sequence[Any], where: str = "state") -> Any:
    """Put the states together that the ranks of one machine have saved on two levels.

    Each has other parameters. A counter of a rank without parameters may be behind: the largest is taken.

    Raises:
        ValueError: with the key, if values differ and are not numbers.
    """
    first_part = parts[0]
    if all(isinstance(part, dict) for part in parts):
        keys = dict.fromkeys(key for part in parts for key in part)
        return {key: merge([part[key] for part in parts if key in part], f"{where}.{key}") for key in keys}
    if all(type(part) in (int, float) for part in parts):
        return max(parts)
    if isinstance(first_part, Tensor) and all(isinstance(part, Tensor) for part in parts):
        same = all(torch.equal(part, first_part) for part in parts)
    else:
        same = all(type(part) is type(first_part) and part == first_part for part in parts[1:])
    if not same:
        raise ValueError(f"{where} differs between ranks of one machine")
    return first_part


def select(state: Any, part: ResidualPart) -> Any:
    """The part of a machine's state that belongs to one of its ranks."""
    if not isinstance(state, dict):
        return state
    tensors, names = set(part["tensors"]), {*part["tensors"], *part["others"]}
    is_by_name = state.keys() <= names
    return {key: select(value, part) for key, value in state.items() if not is_by_name or key in tensors}


def redistribute(
    states: Sequence[Mapping[str, Any]], size: int, parts: Sequence[ResidualPart | None] | None = None
) -> list[dict[str, Any]]:
    """Redistribute the states of all ranks of a run to another number of ranks. Their mean is unchanged.

    Args:
        states: What `compression_state_dict()` returned on every rank, in any order. Of a model that FSDP2 shards,
            the number of shards stays, and ranks are counted machine by machine.
        size: The new number of ranks.
        parts: For two levels (`hierarchical`), the `part` of the new optimizer of each rank.

    Returns:
        The state of each new rank.

    Raises:
        ValueError: The states are not from all ranks of one step and one run, or `size` is not a positive
            multiple of the number of shards.
        FixedSize: Values differ between ranks and cannot be summed. The message has the key.

    Example:
        >>> from dgc.engine.state import Identity, identified
        >>> own = [{"errors": torch.full((2,), float(rank))} for rank in range(4)]
        >>> states = [identified(state, Identity(rank, 4, step=7)) for rank, state in enumerate(own)]
        >>> redistribute(states, 2)[1]["errors"]
        tensor([2.5000, 2.5000])
    """
    known = [identity_of(state) for state in states]
    if not known:
        raise ValueError("there are no states: pass the state of every rank once")
    shards = known[0].shards
    if size < 1 or size % shards:
        raise ValueError(f"{size} ranks cannot have {shards} shards on each machine")
    owners = [(identity.rank, identity.shard) for identity in known]
    if sorted(owners) != [(rank, shard) for rank in range(known[0].size) for shard in range(shards)]:
        raise ValueError(
            f"{len(states)} states, of {', '.join(map(str, known))}: pass the state of every rank once"
        )
    states = [state for _, state in sorted(zip(owners, states, strict=True), key=lambda pair: pair[0])]
    new = []
    for rank in range(size):
        old = [dict(state) for state in states[rank % shards :: shards]]
        saved = [state.get("part") for state in old]
        machines = [r if part is None else part["machine"] for r, part in enumerate(saved)]
        part = None if parts is None else parts[rank]
        new.append(share_of(old.__getitem__, machines, rank // shards, size // shards, part))
    return new


def share_of(
    read: Callable[[int], dict[str, Any]],
    machines: Sequence[int],
    rank: int,
    size: int,
    part: ResidualPart | None,
) -> dict[str, Any]:
    """One rank's share of the states that other ranks or machines have saved. See `redistribute`.

    Args:
        read: Returns the saved `compression_state_dict()` of an old rank. Only those that are needed are read.
        machines: For each old rank, the number of the residual that it had a part of: its machine's on two
            levels, otherwise its own.
        rank, size: This rank and the number of ranks.
        part: The new optimizer's `part`.

    Raises:
        FixedSize: With the key, if values differ and cannot be summed.
    """
    own, states = (rank, size) if part is None else (part["machine"], part["machines"])
    weights = shares(max(machines) + 1, states, own)
    ranks = {old: [rank for rank, machine in enumerate(machines) if machine == old] for old in weights}
    saved = {old: [dict(read(rank)) for rank in ranks[old]] for old in weights}
    identity = _common_identity([identity_of(state) for of in saved.values() for state in of])
    for state in (state for of in saved.values() for state in of):
        state.pop("part", None)
        del state[KEY]
    try:
        merged = {old: merge(parts) for old, parts in saved.items()}
        mixed: dict[str, Any] = blend(merged, weights, "compression")
    except ValueError as error:
        raise FixedSize(str(error)) from error
    if part is not None:
        mixed = {**select(mixed, part), "part": part}
    return identified(mixed, replace(identity, rank=rank, size=size))


def _common_identity(known: Sequence[Identity]) -> Identity:
    """The identity of one of the states. The step, size and settings are equal in all of them."""
    for identity in known:
        if replace(identity, rank=known[0].rank) != known[0]:
            others = ", with other settings" if identity.settings != known[0].settings else ""
            raise ValueError(
                f"the states are not from one run at one step: the one of {known[0]} is of step {known[0].step}, "
                f"the one of {identity} of step {identity.step}{others}"
            )
    return known[0]


def _blend_tensors(parts: list[Tensor], weights: list[float], where: str) -> Tensor:
    first_part = parts[0]
    if any(part.shape != first_part.shape or part.dtype != first_part.dtype for part in parts):
        raise ValueError(f"{where} has different shapes or types on the ranks that saved it")
    if all(torch.equal(part, first_part) for part in parts):
        return first_part.clone()
    if not first_part.is_floating_point():
        raise ValueError(f"{where} differs between the ranks that saved it and is not a floating-point tensor")
    total = sum(weight * part.double() for weight, part in zip(weights, parts, strict=True))
    assert isinstance(total, Tensor)
    return total.to(first_part.dtype)
