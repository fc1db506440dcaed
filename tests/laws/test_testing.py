"""dgc.testing finds each broken law by name, in a compressor that breaks only this one."""

from typing import Any

import pytest

from dgc.compression import RandomKCompressor
from dgc.testing import check_compressor

pytestmark = pytest.mark.usefixtures("no_type_checks")


class Whole(RandomKCompressor):
    def __init__(self) -> None:
        super().__init__(0.5)


class OwnMean(Whole):
    def exchange(self, bucket: Any, v: Any, first_nonfinite: Any) -> Any:
        mean, kept, numbers = yield from super().exchange(bucket, v, first_nonfinite)
        return mean + 1e-6 * self.rank, kept, numbers


class Forgets(Whole):
    def exchange(self, bucket: Any, v: Any, first_nonfinite: Any) -> Any:
        mean, kept, numbers = yield from super().exchange(bucket, v, first_nonfinite)
        return mean, 0.999 * kept, numbers


class Restarts(Whole):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({**state, "steps": dict.fromkeys(state["steps"], 0)})


class KeepsDropped(Whole):
    def rollback(self, bucket: Any) -> None:
        return None


class Silent(Whole):
    def exchange(self, bucket: Any, v: Any, first_nonfinite: Any) -> Any:
        mean, kept, numbers = yield from super().exchange(bucket, v, first_nonfinite)
        return mean, kept, [0] * len(numbers)


def test_a_correct_compressor_passes() -> None:
    check_compressor(Whole)


@pytest.mark.parametrize(
    ("make", "law"),
    [
        (OwnMean, "equal replicas"),
        (Forgets, "nothing lost"),
        (Restarts, "state"),
        (KeepsDropped, "dropped steps: what was sent"),
        (Silent, "dropped steps: .* are reported"),
    ],
)
def test_a_broken_law_is_named(make: type, law: str) -> None:
    with pytest.raises(AssertionError, match=law):
        check_compressor(make)
    if law == "nothing lost":
        check_compressor(make, conserves=False)
