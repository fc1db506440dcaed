"""Damages of saved states: what is wrong with them, and states with one of them each."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Path = tuple[Any, ...]
GONE = object()


def leaves(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All that a state consists of, with its path: mappings too."""
    yield path, state
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves(value, (*path, key))


def put(state: Any, path: Path, value: Any) -> Any:
    """A state with another value at a path. GONE: with none."""
    if not path:
        return value
    new = dict(state)
    if value is GONE and len(path) == 1:
        del new[path[0]]
    else:
        new[path[0]] = put(state[path[0]], path[1:], value)
    return new


def first_as(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "NaN": lambda t: first_as(t, float("nan")),
    "inf": lambda t: first_as(t, float("inf")),
    "beyond all residuals": lambda t: first_as(t, 1e38 if t.dtype != torch.float64 else -1e38),
}
TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "one element more": lambda t: torch.cat([t.reshape(-1), t.new_zeros(1)]),
    "one dimension more": lambda t: t.unsqueeze(0),
    "transposed": lambda t: t.T if t.dim() == 2 and t.shape[0] != t.shape[1] else t.unsqueeze(-1),
    "of another type": lambda t: t.to(torch.float16 if t.dtype == torch.float64 else torch.float64),
    "of integers": lambda t: t.to(torch.int32) if t.dtype != torch.int32 else t.bool(),
    "complex": lambda t: t.to(torch.complex64),
    "without values": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse() if t.dim() else None,
    "a list": lambda t: t.tolist() if t.dim() else [],
    "a number": lambda t: 0.5,
    "text": lambda t: "0.5",
    "None": lambda t: None,
    "a mapping": lambda t: {"a": t},
}
COUNTS: dict[str, Callable[[int], Any]] = {
    "negative": lambda n: -1 - n,
    "a flag": lambda n: True,
    "a fraction": lambda n: n + 0.5,
    "huge": lambda n: 2**70,
    "NaN": lambda n: float("nan"),
    "text": str,
    "None": lambda n: None,
    "a tensor": torch.tensor,
    "a mapping": lambda n: {"a": n},
}
MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "None": lambda m: None,
    "text": lambda m: "state",
    "a list": list,
    "a number": lambda m: 3,
    "a tensor": lambda m: torch.zeros(2, 3),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "other text": lambda x: "of another",
    "a number": lambda x: 7,
    "a tensor": lambda x: torch.zeros(3),
    "a mapping": lambda x: {"a": x},
}


def damages_of(value: Any) -> dict[str, Callable[[Any], Any]]:
    if isinstance(value, Mapping):
        return MAPPINGS
    if isinstance(value, Tensor):
        return {**NUMBERS, **TENSORS} if value.is_floating_point() and value.numel() else TENSORS
    if value is None:  # a number may be valid there
        return {"text": lambda x: "None", "a tensor": lambda x: torch.zeros(3)}
    if isinstance(value, float):  # as another number may be
        return {kind: damage for kind, damage in OTHERS.items() if kind != "a number"}
    return COUNTS if isinstance(value, int) and not isinstance(value, bool) else OTHERS


def hostile(
    state: Any, number: int, seed: int, is_known: Callable[[Path, str], bool]
) -> Iterator[tuple[str, Any]]:
    """So many states with a damage each, and its description.

    is_known: Whether a kind of damage at a path differs from all valid states.
    """
    drawn = random.Random(seed)
    kinds: dict[Any, list[tuple[Path, Any]]] = {}
    for path, value in leaves(state):  # tables of equal entries count once
        kinds.setdefault((*path[:-1], type(value)), []).append((path, value))
    for _ in range(number):
        path, value = drawn.choice(kinds[drawn.choice(list(kinds))])
        kind = drawn.choice([*damages_of(value), *(["missing"] if path else []), "more"])
        if not is_known(path, kind):
            continue
        if kind == "more" and isinstance(value, Mapping):
            more = drawn.choice(["unknown", 5, None])
            yield f"{path}: {more!r} more", put(state, path, {**value, more: torch.ones(2)})
        elif kind == "missing":
            yield f"{path}: missing", put(state, path, GONE)
        elif kind in damages_of(value):
            yield f"{path}: {kind}", put(state, path, damages_of(value)[kind](copy.deepcopy(value)))
