"""From predictions to advice: the table of methods, the recommendation, and where methods cross."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt

from dgc.advisor.candidates import Candidate
from dgc.advisor.cost.model import Network, Prediction
from dgc.advisor.methods import HALVES, UNCOMPRESSED, Loss, within
from dgc.units import human_bytes, human_rate, human_time

WORTHWHILE = 1.1  # times faster than the best uncompressed step: errors of the prediction are as large
BANDWIDTHS = (1.25e6, 1.25e10)  # bytes per second: 10 Mbit/s to 100 Gbit/s
AS_FAST = 1.02  # times as long as the shortest step: within the error of the prediction
LABELS = {
    "dense": "the fp32 all-reduce",
    "fp16": "fp16 all-reduce",
    "bf16": "bf16 all-gather",
    "bf16-two-phases": "bf16 in two phases",
}
HIDDEN = 0.8  # share of the messages behind backward above which the network is no limit


@dataclass(frozen=True)
class Row:
    """A line of the table, of steps that compress. Times are in seconds, bytes of a rank or of a machine."""

    name: str
    usage: tuple[str, ...]
    wire_bytes: float
    cross_wire_bytes: float
    machine_wire_bytes: float
    exchange: float
    communication: float
    compressed_step: float
    step: float
    """The mean over a run, whose first steps may be dense."""
    faster: float
    """How many times faster the mean step is than with the best 16-bit method without compression."""
    dense_share: float
    note: str
    losses: tuple[Loss, ...] = ()
    """What it lost with optimizers of the run's family, the largest first. Empty: it was not measured."""
    within: bool = True
    """Whether these are within the limit, so that it may be recommended."""

    @property
    def most_lost(self) -> float:
        """Percent. Infinite where it was not measured."""
        return max((loss.percent for loss in self.losses), default=float("inf"))


@dataclass(frozen=True)
class Work:
    """Seconds of a step without communication."""

    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    def step(self, prediction: Prediction) -> float:
        """Seconds of a step with overlap."""
        return prediction.step(self.backward, forward=self.forward)

    def mean_step(self, candidate: Candidate, network: Network) -> float:
        """Mean seconds of a step over a run, the dense steps that come first included."""
        compressed = self.step(candidate.predict(network))
        if candidate.dense is None:
            return compressed
        share = candidate.method.dense_share
        return share * self.step(candidate.dense.predict(network)) + (1 - share) * compressed


def tabulate(
    candidates: Sequence[Candidate], network: Network, work: Work, family: str = "sgd", limit: float = 0.0
) -> list[Row]:
    """One row for each candidate. The reference is the best of fp16 and bf16, or dense if there is neither.

    Args:
        candidates: What each method sends and computes.
        network: Between the ranks.
        work: Seconds without communication.
        family: The family of the optimizer, with which some methods lose quality: one of
            `dgc.advisor.methods.FAMILIES`.
        limit: The percentage that a recommended method may have lost with Adam and Muon.
    """
    found = {candidate.method.name: (candidate, candidate.predict(network)) for candidate in candidates}
    steps = {name: work.mean_step(candidate, network) for name, (candidate, _) in found.items()}
    halves = [steps[name] for name in HALVES if name in steps]
    reference = min(halves or [steps[name] for name in UNCOMPRESSED if name in steps])
    return [
        Row(
            name,
            candidate.method.usage,
            prediction.wire_bytes,
            prediction.cross_wire_bytes,
            prediction.machine_wire_bytes,
            prediction.exchange,
            prediction.communication,
            work.step(prediction),
            steps[name],
            reference / steps[name],
            candidate.method.dense_share,
            candidate.method.note,
            tuple(sorted(candidate.method.lost_with.get(family, ()), key=lambda loss: -loss.percent)),
            within(candidate.method, family, limit),
        )
        for name, (candidate, prediction) in found.items()
    ]


def format_table(rows: Sequence[Row]) -> str:
    """The rows as text. Without methods whose first steps are dense, there is one time of a step."""
    two = any(row.dense_share for row in rows)
    step = f"{'compressed step':>16} {'mean step':>10}" if two else f"{'step':>9}"
    lines = [f"{'method':<19} {'bytes sent':>10} {'exchange':>9} {step}   times faster than 16-bit dense"]
    for row in rows:
        step = (
            f"{human_time(row.compressed_step):>16} {human_time(row.step):>10}"
            if two
            else f"{human_time(row.step):>9}"
        )
        dense = f"{100 * row.dense_share:.3g} % of a run's steps are dense" if row.dense_share else ""
        note = ", ".join(filter(None, (row.note, dense)))
        lines.append(
            f"{row.name:<19} {human_bytes(row.wire_bytes):>10} {human_time(row.exchange):>9} {step}   "
            f"{row.faster:<5.2f} {note}".rstrip()
        )
    lines.append("bytes sent, exchange: of one rank in one step" + " that compresses" * two)
    if two:
        lines.append("mean step: over a run; the share of dense steps is assumed, or given by --dense-share")
    return "\n".join(lines)


def format_losses(rows: Sequence[Row], limit: float) -> str:
    """What the methods lost, as text. Empty if no row has a measured loss and all may be recommended."""
    listed = [row for row in rows if row.losses or not row.within]
    if not listed:
        return ""
    lines = [f"{'method':<19} {'most lost (standard error)':<38} {'least lost':<38} measured in"]
    for row in listed:
        if row.losses:
            least = str(row.losses[-1]) if len(row.losses) > 1 else ""
            lines.append(f"{row.name:<19} {row.losses[0]!s:<38} {least:<38} {row.losses[0].source}")
        else:
            lines.append(f"{row.name:<19} not measured with this optimizer")
    lines.append(
        f"lost: to dense training at equal steps; recommended: at most {limit:g} %, two standard errors added, on "
        "every task (--loss)"
    )
    return "\n".join(lines)


@dataclass(frozen=True)
class Advice:
    """The recommendation.

    Attributes:
        method: The recommended row's name.
        compress: Whether it compresses.
        usage: Words that ask for it, as in `Method`.
        reason: One sentence.
    """

    method: str
    compress: bool
    usage: tuple[str, ...]
    reason: str


def advise(rows: Sequence[Row], work: Work, alike: float = 1.0) -> Advice:
    """Recommends a method if the fastest is at least 10 % faster than the best of dense, fp16 and bf16.

    Methods that lost more than the limit are left out.

    Args:
        rows: The table.
        work: Seconds without communication.
        alike: Methods whose step is at most this many times as long as the shortest one count as equally fast. Of
            these, it is the one that sends most, since it loses least.
    """
    plain = min((row for row in rows if row.name in UNCOMPRESSED), key=lambda row: row.step)
    compressed = [row for row in rows if row.name not in UNCOMPRESSED]
    kept = [row for row in compressed if row.within]
    best = min(kept, key=lambda row: row.step, default=plain)
    if plain.step >= WORTHWHILE * best.step:
        best = max((row for row in kept if row.step <= alike * best.step), key=lambda row: row.wire_bytes)
        reason = (
            f"{'the mean' if best.dense_share else 'a'} step takes {human_time(best.step)}, "
            f"{plain.step / best.step:.2f} times faster than {human_time(plain.step)} with {plain.name}"
        )
        return Advice(best.name, True, best.usage, reason)
    hidden = work.seconds + plain.exchange - plain.step
    limited = "" if kept == compressed else " within the limit of --loss"
    label = LABELS[plain.name]
    if hidden >= HIDDEN * plain.exchange:
        reason = f"{label} hides behind backward ({human_time(hidden)} of {human_time(plain.exchange)})"
    elif best is plain:
        which = "is within the limit of --loss" if compressed else f"was compared with {plain.name}"
        reason = f"no method that compresses {which}"
    elif best.step >= plain.step:
        reason = (
            f"computing takes longer than it saves: {human_time(best.step)} for a step with {best.name}, the "
            f"fastest method{limited}, and {human_time(plain.step)} with {plain.name}"
        )
    else:
        reason = (
            f"the fastest method{limited}, {best.name}, needs {human_time(best.step)} for a step and {plain.name} "
            f"{human_time(plain.step)}; a gain below {WORTHWHILE - 1:.0%} is within the error of the prediction"
        )
    return Advice(plain.name, False, plain.usage, reason)


def as_fast(rows: Sequence[Row], advice: Advice) -> list[str]:
    """Other methods whose step is as short as the recommended one's, within the error of the prediction.

    Those that lost more than the limit are left out.
    """
    best = row_of(rows, advice)
    return [row.name for row in rows if row is not best and row.within and row.step <= AS_FAST * best.step]


def over_the_limit(rows: Sequence[Row], advice: Advice) -> list[Row]:
    """Methods with shorter steps than the recommended one that lost more than the limit, the least first."""
    best, gain = row_of(rows, advice), AS_FAST if advice.compress else WORTHWHILE
    return sorted(
        (row for row in rows if not row.within and gain * row.step < best.step),
        key=lambda row: (row.most_lost, row.step),
    )


def row_of(rows: Sequence[Row], advice: Advice) -> Row:
    """The recommended one."""
    return next(row for row in rows if row.name == advice.method)


def step_at(candidate: Candidate, network: Network, work: Work) -> Callable[[float], float]:
    """The mean step as a function of the bandwidth between machines; between the ranks of a single machine."""
    alone = candidate.traffic.size <= network.ranks_per_machine

    def step(bandwidth: float) -> float:
        changed = {"inner_bandwidth": bandwidth} if alone else {"bandwidth": bandwidth}
        return work.mean_step(candidate, replace(network, **changed))  # type: ignore[arg-type]

    return step


def crossing(
    method: Callable[[float], float],
    plain: Callable[[float], float],
    bandwidths: tuple[float, float] = BANDWIDTHS,
) -> float | None:
    """The bandwidth above which `plain` is as fast as `method`; None if one of both is faster in the whole range.

    Both are step times by bandwidth. It is found to 0.1 % by bisection of the logarithm.
    """
    low, high = bandwidths
    if method(low) >= plain(low) or method(high) < plain(high):
        return None
    while high > 1.001 * low:
        middle = sqrt(low * high)
        low, high = (middle, high) if method(middle) < plain(middle) else (low, middle)
    return low


def as_json(rows: Sequence[Row], advice: Advice, network: Network, work: Work) -> dict[str, object]:
    """The result as nested dicts. Times are in seconds, rates in bytes per second."""
    limited = {key: None if value == float("inf") else value for key, value in asdict(network).items()}
    return {
        "network": limited,
        "work": asdict(work),
        "methods": {row.name: {k: v for k, v in asdict(row).items() if k != "name"} for row in rows},
        "advice": asdict(advice),
    }


def describe_crossings(methods: Sequence[Candidate], plain: Candidate, network: Network, work: Work) -> str:
    """One line: below which bandwidth each method's step is faster than the reference's."""
    against, parts = step_at(plain, network, work), []
    for candidate in methods:
        step = step_at(candidate, network, work)
        at, name = crossing(step, against), candidate.method.name
        if at is not None:
            parts.append(f"{name} below {human_rate(at)}")
        else:
            parts.append(f"{name} {'never' if step(BANDWIDTHS[0]) >= against(BANDWIDTHS[0]) else 'at all rates'}")
    return f"Faster than {plain.method.name}, from {' to '.join(map(human_rate, BANDWIDTHS))}: {', '.join(parts)}"
