"""What DGCCompressor's arguments must be: a wrong one gets an error that names it."""

from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from dgc.selection import Exact, Predicted, Sampled, Selector

NUMBER, WHOLE, FLAG = (Real,), (Integral,), (bool,)
NOTHING = (type(None),)


def require(expected: str, kinds: tuple[Any, ...], **arguments: Any) -> None:
    """ValueError for the first argument that is an instance of none of `kinds`.

    True and False are no numbers, and a class is not an instance. expected: the kinds in words.
    """
    for name, value in arguments.items():
        is_flag = isinstance(value, bool) and bool not in kinds
        if is_flag or isinstance(value, type) or not isinstance(value, kinds):
            raise ValueError(f"{name} must be {expected}, not {value!r}")


def selector_of(selector: Selector | None, sample_ratio: float | None, sampling: tuple[Any, ...]) -> Selector:
    """The selector that a caller names, or the sampled one of the original's keywords, or the exact one."""
    if selector is not None and sample_ratio is not None:
        raise ValueError("selector and sample_ratio both choose what is sent: give one of them")
    if sample_ratio is not None:
        return Exact() if sample_ratio == 1 else Sampled(sample_ratio, *sampling)
    unsampled = Sampled()
    if sampling != tuple(getattr(unsampled, f.name) for f in fields(unsampled) if f.name != "sample_ratio"):
        raise ValueError("strided_sample, compress_*_bound, max_adaptation_iters and resample need a sample_ratio")
    return Predicted() if selector is None else selector
