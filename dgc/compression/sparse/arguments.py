"""Validation of DGCCompressor's arguments. An error names the wrong argument."""

from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from dgc.selection import Exact, Predicted, Sampled, Selector

NUMBER, WHOLE, FLAG = (Real,), (Integral,), (bool,)
NOTHING = (type(None),)


def require(expected: str, kinds: tuple[Any, ...], **arguments: Any) -> None:
    """Raises ValueError for the first argument that is not an instance of any of `kinds`.

    True and False do not count as numbers, and a class does not count as an instance. expected: the kinds in
    words.
    """
    for name, value in arguments.items():
        is_flag = isinstance(value, bool) and bool not in kinds
        if is_flag or isinstance(value, type) or not isinstance(value, kinds):
            raise ValueError(f"{name} must be {expected}, not {value!r}")


def selector_of(selector: Selector | None, sample_ratio: float | None, sampling: tuple[Any, ...]) -> Selector:
    """Returns the given selector, or the sampled selector of the original's keywords, or the exact default."""
    if selector is not None and sample_ratio is not None:
        raise ValueError("selector and sample_ratio both choose what is sent: give one of them")
    if sample_ratio is not None:
        return Exact() if sample_ratio == 1 else Sampled(sample_ratio, *sampling)
    unsampled = Sampled()
    if sampling != tuple(getattr(unsampled, f.name) for f in fields(unsampled) if f.name != "sample_ratio"):
        raise ValueError("strided_sample, compress_*_bound, max_adaptation_iters and resample need a sample_ratio")
    return Predicted() if selector is None else selector
