"""Bytes by the formulas, with three ranks by default and 1200 bytes of payload, and the timeline of a step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optim.nets import dgc, dgc_sgd, net, train, wrap

from dgc.comm import AllGather, AllReduce, AllToAll, Broadcast, Exchange, ReduceScatter, TrafficMeter
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.meter import PHASES, Trace, bytes_of
from dgc.comm.requests import Request

T = torch.zeros(300)  # 1200 bytes
THIRDS = AllToAll(T, (100, 50, 150))


@pytest.mark.parametrize(
    ("request_", "rank", "payload", "wire"),
    [
        (AllReduce(T), 0, 1200, 1600.0),
        (AllReduce(T.half()), 0, 600, 800.0),
        (AllGather(T), 2, 1200, 2400.0),
        (AllGather(torch.zeros(24, dtype=torch.uint8)), 2, 24, 48.0),
        (ReduceScatter(T), 1, 1200, 800.0),
        (Broadcast(T, 1), 1, 1200, 800.0),
        (Broadcast(T, 1), 0, 0, 800.0),
        (THIRDS, 0, 1200, 800.0),
        (THIRDS, 1, 1200, 1000.0),
        (THIRDS, 2, 1200, 600.0),
        (Exchange({0: T, 2: torch.zeros(25)}, {2: T}), 1, 1300, 1300.0),
        (Exchange({1: T, 2: torch.zeros(25)}, {2: T}), 1, 100, 100.0),
        (Exchange({}, {2: T}), 1, 0, 0.0),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int | float) else None,
)
def test_bytes_are_counted_by_the_formulas(request_: Request, rank: int, payload: int, wire: float) -> None:
    assert bytes_of(request_, rank, 3)[:2] == (payload, pytest.approx(wire))


@pytest.mark.parametrize("kind", [AllReduce, AllGather, ReduceScatter, Broadcast])
def test_a_single_rank_sends_nothing(kind: Callable[[torch.Tensor], Request]) -> None:
    assert bytes_of(kind(T), 0, 1)[1] == 0


@pytest.mark.parametrize(("size", "expected"), [(1, 0.0), (2, 4000.0), (4, 6000.0)])
def test_dense_bytes_are_those_that_a_ring_all_reduce_in_fp32_sends(size: int, expected: float) -> None:
    meter = TrafficMeter()
    meter.count_dense(1000, size)
    assert meter.dense_wire_bytes == expected == bytes_of(AllReduce(torch.zeros(1000)), 0, size)[1]


def test_totals_count_the_group_of_each_request() -> None:
    def body() -> Any:
        yield (AllReduce(T.clone()), AllGather(T))
        yield (AllGather(T, "local"),)
        yield (AllGather(T, "cross"),)
        yield (Broadcast(T.clone(), 1, "local"),)

    world = LockstepWorld(6, local_size=3)
    world.converse("test", [body() for _ in range(6)])
    for rank, meter in enumerate(world.meters):
        assert meter.payload_bytes == (4 + (rank % 3 == 1)) * 1200 and meter.rounds == 4  # rank 1 is the root
        assert meter.wire_bytes == pytest.approx(2 * 1200 * 5 / 6 + 1200 * 5 + 1200 * 2 + 1200 * 1 + 1200 * 2 / 3)


def test_totals_continue_from_a_saved_state() -> None:
    whole, first, second = TrafficMeter(2), TrafficMeter(2), TrafficMeter(2)
    four = LockstepWorld(4).transports[0]
    for each in (whole, first):
        each.count(AllReduce(torch.zeros(10)), four)
        each.count_dense(10, 4)
    second.load_state_dict(first.state_dict())
    for each in (whole, second):
        each.count(AllGather(torch.zeros(7)), four)
        each.count_dense(10, 4)
    assert second == whole


def test_what_is_not_the_state_of_a_meter_is_refused() -> None:
    with pytest.raises(ValueError, match="not the state of a meter: it has \\['bytes'\\]"):
        TrafficMeter(2).load_state_dict({"bytes": 1.0})


def test_a_step_has_every_phase_of_every_bucket(tmp_path: Path) -> None:
    steps = 3

    def body(transport: Any) -> Any:
        model = net()
        optimizer = wrap(model, transport, dgc_sgd, compression=dgc(), bucket_mb=1e-4)
        optimizer.meter.trace = Trace(transport.rank)
        train(model, optimizer, range(steps), transport.rank)
        return [plan.bucket.name for plan in optimizer.planned], optimizer.meter

    for rank, (buckets, meter) in enumerate(LockstepWorld(2).run(body)):
        meter.trace.save(path := tmp_path / "deep" / "trace.json")
        events = json.loads(path.read_text())["traceEvents"]
        rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        drawn = [(rows[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
        assert {e["pid"] for e in events} == {rank} and len(buckets) > 2
        for bucket in buckets:
            for phase in ("compress", "launch", "wait", "decode"):
                count = sum(row == bucket and name == phase for row, name, _, _ in drawn)
                assert count == steps or (phase == "wait" and count <= steps)
            assert sum(row == f"{bucket} (network)" and name == "in flight" for row, name, _, _ in drawn) == steps
        assert sum(name == "step" for _, name, _, _ in drawn) == steps
        # the phases of one row follow one another, and their sum is what the meter counts
        for row in set(rows.values()):
            own = sorted((start, start + long) for name, _, start, long in drawn if name == row)
            assert all(a[1] <= b[0] + 1e-2 for a, b in zip(own, own[1:], strict=False))
        for phase in PHASES:
            total = sum(long for _, name, _, long in drawn if name == phase)
            assert abs(total * 1e-6 - meter.seconds[phase]) < 1e-4
    trace = Trace(0, limit=2)  # counts what it drops
    for i in range(5):
        trace.add("wait", "b", i, i + 1)
    trace.save(path)
    document = json.loads(path.read_text())
    assert sum(e["ph"] == "X" for e in document["traceEvents"]) == 2 and document["droppedEvents"] == 3


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        ({}, "sent nothing: there is no other rank, with FSDP2 no other machine, or no step was taken"),
        ({"wire_bytes": 9.8e7}, "sent 98.0 MB"),
        ({"wire_bytes": 9.8e7, "dense_wire_bytes": 7.64e8}, "sent 98.0 MB, 7.8 times fewer than dense"),
        (
            {"wire_bytes": 6e6, "dense_wire_bytes": 8e6, "cross_wire_bytes": 1e6, "dense_cross_wire_bytes": 4e6},
            "sent 6.00 MB, 1.33 times fewer than dense; to other machines 1.00 MB, 4 times fewer than dense",
        ),
    ],
)
def test_the_summary_says_what_was_sent_in_one_line(counts: dict[str, float], line: str) -> None:
    assert TrafficMeter(dense="dense", **counts).summary() == line  # type: ignore[arg-type]
