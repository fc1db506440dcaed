"""Assigns a compressor to each parameter."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf

from dgc.core.arguments import checked
from dgc.core.bucket import Segment
from dgc.core.dense import average_alike
from dgc.core.protocol import Compressor


@checked
@dataclass(frozen=True)
class Rule:
    """Matches parameters, with inclusive ranges.

    Args:
        compressor (Compressor): the compressor of the matching parameters.
        name (str): shell pattern for the parameter's name.
        min_dim, max_dim (int): number of dimensions.
        min_numel, max_numel (int): number of elements.
    """

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


@checked
class Route:
    """Chooses compressors by rules in order. Tensors that a compressor does not accept go to its own fallback.

    Of compressors without state and with equal settings, the first one stands for all: their tensors share
    buckets, and so messages.

    Args:
        rules (sequence of Rule): rules; the first that matches applies.

    Raises:
        ValueError: if there are no rules, or by `compressor_for` if no rule matches a parameter.

    Example:
        >>> route = Route([Rule(PowerSGDCompressor(rank=4), min_dim=2), Rule(FP16Compressor())])
    """

    def __init__(self, rules: Sequence[Rule]):
        if not rules:
            raise ValueError("a Route needs at least one Rule")
        for rule in rules:
            if not isinstance(rule, Rule):
                raise ValueError(f"rules must have a Rule(compressor) for each compressor, not {rule!r}")
        self.rules = tuple(rules)
        chosen: list[Compressor] = []
        # of each rule, what exchanges the tensors that its compressor accepts, and the others
        self._of_rules = [
            tuple(_one_for_all(compressor, chosen) for compressor in (rule.compressor, rule.compressor.fallback))
            for rule in rules
        ]

    @property
    def point_to_point(self) -> bool:
        """Whether a compressor sends messages from rank to rank."""
        return any(rule.compressor.point_to_point for rule in self.rules)

    def compressor_for(self, segment: Segment) -> Compressor:
        for rule, (compressor, fallback) in zip(self.rules, self._of_rules, strict=True):
            if rule.matches(segment):
                return compressor if rule.compressor.accepts(segment) else fallback
        raise ValueError(f"no rule matches {segment.name} of shape {segment.shape}; end with a rule for all")


def _one_for_all(compressor: Compressor, chosen: list[Compressor]) -> Compressor:
    """The compressor that averages alike, of those that were chosen before, or this one, which is then added."""
    for one in chosen:
        if average_alike(one, compressor):
            return one
    chosen.append(compressor)
    return compressor
