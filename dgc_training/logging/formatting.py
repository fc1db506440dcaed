"""Formats results, counts, bytes and their comparison with a dense all-reduce as text."""


def plural(count: int, noun: str) -> str:
    """1 rank, 2 ranks."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def result_text(value: float) -> str:
    """A result of an evaluation: two decimals, or four below 10, where a percent of bits per character is 0.02."""
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.4f}"


def human_bytes(count: float) -> str:
    """12_345_678 -> '12.3 MB': three digits."""
    if count < 999.5:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5 or unit == "TB":
            break
    return f"{count:.{0 if count >= 99.95 else 1 if count >= 9.995 else 2}f} {unit}"


def against_dense(wire: float, dense_wire: float) -> str:
    """Compares `wire` bytes with the wire bytes of a dense all-reduce, which must be more than 0."""
    if not wire:
        return "nothing was sent"
    if 0.95 < wire / dense_wire < 1.05:
        return "as many as a dense fp32 all-reduce"
    if wire < dense_wire:
        return f"{dense_wire / wire:.3g} times fewer than a dense fp32 all-reduce"
    return f"{wire / dense_wire:.2g} times the bytes of a dense fp32 all-reduce"
