"""Checks of the arguments of `OuterSteps`."""

import math
from collections.abc import Callable, Iterable

from torch.optim import Optimizer

from dgc.arguments import NOTHING, NUMBER, WHOLE, require
from dgc.compression.protocol import Compressor
from dgc.compression.route import Route
from dgc.gossip.protocol import Gossip

COMMON_START = (
    "call dgc.optim.broadcast_parameters(model.state_dict()) before GossipOptimizer, because ranks exchange only "
    "changes"
)


def check_arguments(
    average_every: int,
    base: Gossip | None,
    outer: object,
    outer_schedule: object,
    fragment_mb: float | None,
    delay: int,
    alpha: float,
    warmup_steps: int,
) -> None:
    """Raise ValueError for an argument that is out of range, or arguments that do not fit together."""
    require("a whole number of at least 1 step", WHOLE, least=1, average_every=average_every)
    require("a whole number of 0 steps or more", WHOLE, least=0, delay=delay, warmup_steps=warmup_steps)
    require("a number", NUMBER, alpha=alpha)
    require("a number, or None for one fragment", NUMBER + NOTHING, fragment_mb=fragment_mb)
    if base is not None and (isinstance(base, type) or not isinstance(base, Gossip)):
        raise ValueError(f"base must be a gossip algorithm such as SGP(), or None, not {base!r}")
    if base is not None and not base.is_synchronous:
        raise ValueError(
            f"{type(base).__name__} is asynchronous, so its ranks have no common step after which to average"
        )
    is_optimizer = isinstance(outer, type) and issubclass(outer, Optimizer)
    if outer is not None and not is_optimizer and not _is_maker(outer):
        raise ValueError(
            f"outer must make an optimizer from a list of tensors, such as Nesterov() or partial(torch.optim.SGD, "
            f"lr=1.0), not {outer!r}"
        )
    if outer_schedule is not None and not _is_maker(outer_schedule):
        raise ValueError(
            "outer_schedule must return a factor of the outer learning rate for a step, such as "
            f"Ramp(0.4, 1.0, 3000), not {outer_schedule!r}"
        )
    if fragment_mb is not None and not fragment_mb > 0:
        raise ValueError(f"fragment_mb must be positive, or None for one fragment, not {fragment_mb}")
    if not 0 <= alpha < 1:
        raise ValueError(f"alpha must be in [0, 1): at 1 a rank would never take over a mean. It is {alpha}")
    if alpha == 0 and delay == average_every:
        raise ValueError(
            f"delay={delay} is all of average_every={average_every} steps, and with alpha=0 what a rank learns "
            "in these steps is dropped: use a shorter delay, or alpha=0.5"
        )
    if base is not None and (fragment_mb is not None or delay or alpha):
        raise ValueError(
            f"{type(base).__name__} mixes whole models between exchanges: leave out fragment_mb, delay and alpha, "
            "or the base"
        )


def outer_factor(schedule: Callable[[int], float], step: int) -> float:
    """The factor of the outer learning rate. Raises ValueError if it is not a finite number of at least 0."""
    value = schedule(step)
    try:
        factor = float(value)
    except (TypeError, ValueError):
        factor = math.nan
    if not 0 <= factor < math.inf:
        raise ValueError(
            f"outer_schedule returned {value!r} at step {step}: it must return the factor of the outer learning "
            "rate, a finite number of at least 0"
        )
    return factor


def _is_maker(value: object) -> bool:
    """Whether it can be called, and is no class whose instances are meant, such as Nesterov for Nesterov()."""
    return callable(value) and not isinstance(value, type)


def check_momentum(route: Route) -> None:
    """Raise ValueError if a compressor applies momentum, which is the outer optimizer's."""
    for rule in route.rules:
        if rule.compressor.correction is not None:
            raise ValueError(
                f"{type(rule.compressor).__name__} applies momentum to pseudo-gradients, and the outer optimizer "
                "does too: give it memory=ResidualMemory()"
            )


def check_alpha(alpha: float, compressors: Iterable[Compressor]) -> None:
    """Raise ValueError if what a compressor keeps for later would stay in the model as well, and be sent twice."""
    for compressor in compressors:
        if alpha and any(True for _ in compressor.errors()):
            raise ValueError(
                f"alpha={alpha} keeps a share of the rank's own model, and {type(compressor).__name__} sends "
                "later what it has not sent of it, which would count twice: use alpha=0, or a compressor without "
                "error state such as FP16Compressor()"
            )


def check_schedule(fragments: int, average_every: int, delay: int) -> None:
    """Raise ValueError if the exchanges of two fragments would be in flight at once."""
    if fragments > average_every:
        raise ValueError(
            f"the model has {fragments} fragments, but average_every={average_every} steps begin at most as many "
            "exchanges: increase fragment_mb or average_every"
        )
    if delay > average_every // fragments:
        raise ValueError(
            f"delay={delay} is too long: with {fragments} fragments every {average_every} steps, an exchange "
            f"begins {average_every // fragments} steps after the one before it, which must have ended"
        )
