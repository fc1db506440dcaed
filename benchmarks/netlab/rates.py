"""Rates and delays as they are written, and the rate that a link reaches."""

import re

RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
DELAYS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_rate(text: str) -> float:
    """Bits per second of a rate such as "100mbit" or "2.5gbit".

    Raises:
        ValueError: It is not a rate from 1mbit to 100gbit.
    """
    bits = _parse(text, RATES, "a rate such as 100mbit, 1gbit or 2.5gbit")
    if not 1e6 <= bits <= 1e11:
        raise ValueError(f"the rate must be 1mbit to 100gbit, not {text}")
    return bits


def parse_latency(text: str) -> float:
    """Seconds of a delay such as "500us" or "10ms".

    Raises:
        ValueError: It is not a delay above 0 and up to 1s.
    """
    seconds = _parse(text, DELAYS, "a delay such as 500us or 10ms")
    if not 0 < seconds <= 1:
        raise ValueError(f"the latency must be above 0 and at most 1s, not {text}")
    return seconds


def _parse(text: str, units: dict[str, float], what: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", str(text))
    if found is None or found[2] not in units:
        raise ValueError(f"{text!r} is not {what}")
    return float(found[1]) * units[found[2]]
