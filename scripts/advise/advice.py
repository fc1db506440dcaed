"""From predictions to advice: the table of methods, the recommendation, and where methods cross."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt

from dgc.cost import Network, Prediction
from dgc_training.logging.formatting import human_bytes
from scripts.advise.candidates import Candidate
from scripts.advise.methods import HALVES, UNCOMPRESSED

WORTHWHILE = 1.1  # times faster than the best uncompressed step: errors of the prediction are as large
BANDWIDTHS = (1.25e6, 1.25e10)  # bytes per second: 10 Mbit/s to 100 Gbit/s
HIDDEN = 0.8  # share of the messages behind backward above which the network is no limit


@dataclass(frozen=True)
class Row:
    """A line of the table. Times are in seconds, bytes are those that one rank sends, or all of a machine."""

    name: str
    files: tuple[str, ...]
    wire_bytes: float
    cross_wire_bytes: float
    machine_wire_bytes: float
    exchange: float
    communication: float
    step: float
    faster: float
    """Times that a step is faster than that of the best 16-bit method without compression."""


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


def tabulate(candidates: Sequence[Candidate], network: Network, work: Work) -> list[Row]:
    """One row for each candidate. The reference is the best of fp16 and bf16, or dense if there is neither."""
    found = {candidate.method.name: (candidate, candidate.predict(network)) for candidate in candidates}
    steps = {name: work.step(prediction) for name, (_, prediction) in found.items()}
    halves = [steps[name] for name in HALVES if name in steps]
    reference = min(halves or [steps[name] for name in UNCOMPRESSED if name in steps])
    return [
        Row(
            name,
            candidate.method.files,
            prediction.wire_bytes,
            prediction.cross_wire_bytes,
            prediction.machine_wire_bytes,
            prediction.exchange,
            prediction.communication,
            steps[name],
            reference / steps[name],
        )
        for name, (candidate, prediction) in found.items()
    ]


def format_table(rows: Sequence[Row]) -> str:
    """The rows as text, in milliseconds."""
    lines = [f"{'method':<19} {'bytes sent':>10} {'exchange':>11} {'step':>11}   times faster than 16-bit dense"]
    for row in rows:
        lines.append(
            f"{row.name:<19} {human_bytes(row.wire_bytes):>10} {1e3 * row.exchange:>8.1f} ms "
            f"{1e3 * row.step:>8.1f} ms   {row.faster:.2f}"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Advice:
    """The recommendation.

    Attributes:
        method: The recommended row's name.
        compress: Whether it compresses.
        files: Config files to stack after the experiment.
        reason: One sentence.
    """

    method: str
    compress: bool
    files: tuple[str, ...]
    reason: str


def advise(rows: Sequence[Row], work: Work) -> Advice:
    """Recommends the fastest method if it is at least 10 % faster than the best of dense, fp16 and bf16."""
    plain = min((row for row in rows if row.name in UNCOMPRESSED), key=lambda row: row.step)
    compressed = [row for row in rows if row.name not in UNCOMPRESSED]
    best = min(compressed, key=lambda row: row.step, default=plain)
    if plain.step >= WORTHWHILE * best.step:
        reason = (
            f"a step takes {milliseconds(best.step)}, {plain.step / best.step:.2f} times faster than "
            f"{milliseconds(plain.step)} with {plain.name}"
        )
        return Advice(best.name, True, best.files, reason)
    hidden = work.seconds + plain.exchange - plain.step
    label = {"dense": "the fp32 all-reduce", "fp16": "fp16 all-reduce", "bf16": "bf16 all-gather"}[plain.name]
    if hidden >= HIDDEN * plain.exchange:
        reason = f"{label} hides behind backward ({milliseconds(hidden)} of {milliseconds(plain.exchange)})"
    elif best is plain:
        reason = f"no method that compresses was compared with {plain.name}"
    elif best.step >= plain.step:
        reason = (
            f"computing takes longer than it saves: {milliseconds(best.step)} for a step with {best.name}, the "
            f"fastest method, and {milliseconds(plain.step)} with {plain.name}"
        )
    else:
        reason = (
            f"the fastest method, {best.name}, needs {milliseconds(best.step)} for a step and {plain.name} "
            f"{milliseconds(plain.step)}; a gain below {WORTHWHILE - 1:.0%} is within the error of the prediction"
        )
    return Advice(plain.name, False, plain.files, reason)


def as_fast(rows: Sequence[Row], advice: Advice) -> list[str]:
    """Other methods whose step is at most 2 % longer than the recommended one's."""
    best = next(row for row in rows if row.name == advice.method)
    return [row.name for row in rows if row is not best and row.step <= 1.02 * best.step]


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def step_at(candidate: Candidate, network: Network, work: Work) -> Callable[[float], float]:
    """The step time as a function of the bandwidth between machines; between the ranks of a single machine."""
    alone = candidate.traffic.size <= network.ranks_per_machine

    def step(bandwidth: float) -> float:
        changed = {"inner_bandwidth": bandwidth} if alone else {"bandwidth": bandwidth}
        return work.step(candidate.predict(replace(network, **changed)))  # type: ignore[arg-type]

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
