"""Seconds and bytes of steps: measured on each rank, merged over ranks and repeats, and printed as a table."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from statistics import mean, median
from time import perf_counter
from typing import Any

from benchmarks._harness import Table
from benchmarks._laboratory import sent
from benchmarks._launches import Link
from dgc.comm import Transport, all_gather_object, barrier
from dgc.comm.meter import PHASES, TrafficMeter

Row = dict[str, float]


def measured(step: Callable[[], None], meter: TrafficMeter, transport: Transport) -> Row:
    """Run a step on all ranks, and return its seconds, its bytes and those that this host's interface has sent."""
    barrier(transport)
    before = dict(meter.seconds)
    counted = meter.payload_bytes, meter.wire_bytes, meter.cross_wire_bytes
    link, start = sent(), perf_counter()
    step()
    whole = perf_counter() - start
    barrier(transport)
    link_after, until = sent(), perf_counter() - start
    phases = {phase: meter.seconds[phase] - before[phase] for phase in PHASES}
    found = {
        "exchange": whole - phases["step"],
        "whole": whole,
        "until": until,
        "payload": float(meter.payload_bytes - counted[0]),
        "wire": meter.wire_bytes - counted[1],
        "machine": (meter.cross_wire_bytes - counted[2]) * transport.local_size,
        **{f"phase {phase}": seconds for phase, seconds in phases.items()},
    }
    if link is not None and link_after is not None:
        found["link"] = float(link_after - link)
    return found


def merged(own: Mapping[str, Mapping[int, Row]], transport: Transport) -> dict[str, dict[str, Any]]:
    """One row for each method, of all ranks and their rounds. Collective."""
    everyone = all_gather_object(transport, {name: list(rounds.values()) for name, rounds in own.items()})
    return {name: row_of([rank[name] for rank in everyone]) for name in own}


def row_of(everyone: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """Medians over steps, of the slowest rank or of the mean over ranks."""
    steps = list(zip(*everyone, strict=True))
    keys = everyone[0][0]
    slowest = {key: median(max(rank[key] for rank in step) for step in steps) for key in ("exchange", "whole")}
    means = {key: median(mean(rank[key] for rank in step) for step in steps) for key in keys if key not in slowest}
    row = {
        "exchange_ms": 1e3 * slowest["exchange"],
        "step_ms": 1e3 * slowest["whole"],
        "payload_bytes": means["payload"],
        "wire_bytes": means["wire"],
        "machine_bytes": means["machine"],
        "until_ms": 1e3 * means["until"],
        "phases_ms": {phase: 1e3 * means[f"phase {phase}"] for phase in PHASES},
    }
    return row | {"link_bytes": means["link"]} if "link" in means else row


def add_network(
    rows: dict[str, dict[str, Any]],
    network: dict[str, Any],
    key: str,
    idle: Callable[[str], str],
    opponents: Sequence[str],
    per_step: Sequence[str] = (),
) -> None:
    """Add to each row what depends on the network.

    key: the time that is compared. idle: given a method, the one beside it that exchanges nothing. What the
    interface sends with that one, for as long as the method takes, is taken off its bytes; with those in
    `per_step`, which send the same bytes in every step, however long it takes. opponents: `faster` and `fewer`
    are time and bytes of the fastest of these over time and bytes of the method.
    """
    sent = {name: (row["link_bytes"], row["until_ms"]) for name, row in rows.items()}
    for name, row in rows.items():
        nbytes, milliseconds = sent.get(idle(name), (0.0, 1.0))
        times_longer = 1.0 if idle(name) in per_step else row["until_ms"] / milliseconds
        row["idle_bytes"] = min(nbytes * times_longer, row["link_bytes"])
        row["link_bytes"] -= row["idle_bytes"]
        row["link_over_meter"] = row["link_bytes"] / row["machine_bytes"] if row["machine_bytes"] else None
        row["bound_ms"] = 1e3 * 8 * row["machine_bytes"] / network["bits_per_second"]
    if (best := min((rows[o] for o in opponents if o in rows), key=itemgetter(key), default=None)) is not None:
        for row in rows.values():
            row["faster"] = best[key] / row[key]
            row["fewer"] = best["link_bytes"] / row["link_bytes"] if row["link_bytes"] else None


def print_table(rows: dict[str, dict[str, Any]], network: dict[str, Any] | None, keys: Sequence[str]) -> None:
    """Print the rows. `keys` are the columns of times, of "exchange_ms" and "step_ms"."""
    columns = [(key, key.replace("_", " "), "12.1f") for key in keys]
    columns += [("wait", "wait ms", "10.1f"), ("payload", "payload MB", "12.3f"), ("wire", "wire MB", "10.3f")]
    if network is not None:
        link = Link(network["bits_per_second"], network["round_trip"])
        print(f"{network['hosts']} hosts, {network['rate']} each way: {link}")
        columns += [("link", "link MB", "10.3f"), ("link_over_meter", "/ meter", "9.3f")]
        columns += [("bound_ms", "bound ms", "10.1f"), ("faster", "faster", "8.2f"), ("fewer", "fewer", "8.2f")]
    table = Table("method", 26, columns)
    for name, row in rows.items():
        sizes = {what: row.get(f"{what}_bytes") for what in ("payload", "wire", "link")}
        megabytes = {what: size / 1e6 for what, size in sizes.items() if size is not None}
        table.add(name, {**row, **megabytes, "wait": row["phases_ms"]["wait"]})
