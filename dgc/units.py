"""Counts, bytes, rates and times as text, and back."""

import re

RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}  # bits per second
TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
PERCENT = {"%": 1.0}
COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def quantity(text: str, units: dict[str, float], what: str, valid: tuple[str, str]) -> float:
    """The number in "1gbit", "50 us" or "350M".

    Args:
        text: A number and a unit.
        units: The factor of each unit.
        what: The option, for the message.
        valid: The smallest and the largest valid quantity, as text.

    Raises:
        ValueError: The text has another form, or its number is out of range.
    """
    try:
        value = _parsed(text, units)
    except ValueError:
        known = ", ".join(filter(None, units))
        raise ValueError(f"{what} is {text!r}: write a number and a unit of {known}") from None
    least, most = valid
    if not _parsed(least, units) <= value <= _parsed(most, units):
        raise ValueError(f"{what} is {text!r}; it must be from {least} to {most}")
    return value


def _parsed(text: str, units: dict[str, float]) -> float:
    found = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z%]*?)(?:/s|ps)?", text.strip().lower())
    if found is None or found[2] not in units:
        raise ValueError
    return float(found[1]) * units[found[2]]


def plural(count: int, noun: str) -> str:
    """1 rank, 2 ranks."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def human_bytes(count: float) -> str:
    """12_345_678 -> '12.3 MB': three digits."""
    if count < 999.5:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5 or unit == "TB":
            break
    return f"{count:.{0 if count >= 99.95 else 1 if count >= 9.995 else 2}f} {unit}"


def against_dense(wire: float, dense_wire: float, dense: str = "a dense fp32 all-reduce") -> str:
    """Compare `wire` bytes with the bytes of `dense`, `dense_wire`, which must be more than 0."""
    if not wire:
        return "nothing was sent"
    if 0.95 < wire / dense_wire < 1.05:
        return f"as many as {dense}"
    if wire < dense_wire:
        return f"{dense_wire / wire:.3g} times fewer than {dense}"
    return f"{wire / dense_wire:.2g} times the bytes of {dense}"


def human_time(seconds: float) -> str:
    """0.6319 -> '632 ms', 19.6075 -> '19.6 s': three digits."""
    if seconds >= 0.9995:
        scaled, unit = seconds, "s"
    else:
        scaled, unit = (1e3 * seconds, "ms") if seconds >= 0.9995e-3 else (1e6 * seconds, "us")
    return f"{scaled:.{0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2}f} {unit}"


def human_rate(bandwidth: float, digits: int = 2) -> str:
    """125e6 bytes per second -> '1 Gbit/s', with so many digits."""
    bits, unit = 8 * bandwidth, "bit/s"
    for larger in ("kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"):
        if bits < 999.5:
            break
        bits, unit = bits / 1000, larger
    return f"{float(f'{bits:.{digits}g}'):g} {unit}"
