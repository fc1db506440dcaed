"""dgc.testing finds each broken law by name, in a compressor that breaks only this one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dgc.compression import RandomKCompressor
from dgc.state import State
from dgc.testing import check_compressor

pytestmark = pytest.mark.usefixtures("no_type_checks")


class Whole(RandomKCompressor):
    def __init__(self) -> None:
        super().__init__(0.5)


def broken(change: Callable[..., Any]) -> type[Whole]:
    """What an exchange returns changes."""

    class Broken(Whole):
        def exchange(self, bucket: Any, state: Any, v: Any, first_nonfinite: Any) -> Any:
            mean, kept, numbers = yield from super().exchange(bucket, state, v, first_nonfinite)
            return change(state.rank, mean, kept, numbers)

    return Broken


class Restarted(State):
    def loaded(self, bucket: Any, tables: Any) -> Any:
        return replace(super().loaded(bucket, tables), steps=0)


class Restarts(Whole):
    def init(self, bucket: Any, size: int, rank: int) -> Restarted:
        return Restarted(**vars(super().init(bucket, size, rank)))


class KeepsDropped(Whole):
    def reduce(self, bucket: Any, state: Any) -> Any:
        reduced = yield from super().reduce(bucket, state)
        return replace(reduced, dropped=reduced.state)


def test_a_correct_compressor_passes() -> None:
    check_compressor(Whole)


@pytest.mark.parametrize(
    ("make", "law"),
    [
        (broken(lambda rank, mean, kept, numbers: (mean + 1e-6 * rank, kept, numbers)), "equal replicas"),
        (broken(lambda rank, mean, kept, numbers: (mean, 0.999 * kept, numbers)), "nothing lost"),
        (Restarts, "state"),
        (KeepsDropped, "dropped steps: what was sent"),
        (broken(lambda rank, mean, kept, numbers: (mean, kept, [0] * len(numbers))), "dropped steps: .* reported"),
    ],
)
def test_a_broken_law_is_named(make: type, law: str) -> None:
    with pytest.raises(AssertionError, match=law):
        check_compressor(make)
    if law == "nothing lost":
        check_compressor(make, conserves=False)
