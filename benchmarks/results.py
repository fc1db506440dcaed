"""The result of a benchmark in JSON, which it prints as its last line."""

import json
import math
from typing import Any


def print_json(result: Any) -> None:
    """Prints a result as one line of JSON."""
    print(to_json(result))


def to_json(result: Any) -> str:
    """One line of JSON. JSON has no NaN and no infinity: such numbers become null."""
    return json.dumps(_finite(result), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
