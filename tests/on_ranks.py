"""Tests that are functions of a rank, which simulated ranks run."""

from collections.abc import Callable
from functools import partial, wraps
from inspect import Signature, signature
from typing import Any

from dgc.comm.lockstep import LockstepWorld


def as_test(body: Callable[..., Any], run: Callable[[Callable[..., Any]], object], given: int) -> Any:
    """A test that calls `run(body)`. What body takes after its first `given` arguments is given by pytest."""

    @wraps(body)
    def test(**values: Any) -> None:
        run(partial(body, **values))

    decorated: Any = test
    decorated.__signature__ = Signature([*signature(body).parameters.values()][given:])
    return decorated


def on_ranks(size: int, local_size: int | None = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator of a test `body(transport, ...)`: every rank of such a world runs it."""
    return lambda body: as_test(body, lambda one: LockstepWorld(size, local_size, **options).run(one), 1)
