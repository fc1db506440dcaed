"""Which compressor takes which parameter: that of the first rule that matches."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf

from dgc.bucket import Segment
from dgc.compression.protocol import Compressor


@dataclass(frozen=True)
class Rule:
    """Matches parameters by name (a shell pattern), number of dimensions and number of elements."""

    compressor: Compressor
    name: str = "*"
    min_dim: int = 0
    max_dim: float = inf
    min_numel: int = 0
    max_numel: float = inf

    def matches(self, segment: Segment) -> bool:
        return (
            fnmatchcase(segment.name, self.name)
            and self.min_dim <= len(segment.shape) <= self.max_dim
            and self.min_numel <= segment.numel <= self.max_numel
        )


class Route:
    """Rules in order. A compressor that does not accept a tensor passes it to its own fallback."""

    def __init__(self, rules: Sequence[Rule]):
        if not rules:
            raise ValueError("a Route needs at least one Rule")
        self.rules = tuple(rules)

    def compressor_for(self, segment: Segment) -> Compressor:
        for rule in self.rules:
            if rule.matches(segment):
                return rule.compressor if rule.compressor.accepts(segment) else rule.compressor.fallback
        raise ValueError(f"no rule matches {segment.name} of shape {segment.shape}; end with a rule for all")
