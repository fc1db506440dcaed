"""Bytes by the formulas: three ranks by default, 1200 bytes of payload."""

from typing import Any

import pytest
import torch

from dgc.comm import AllGather, AllReduce, AllToAll, Broadcast, Exchange, ReduceScatter, TrafficMeter
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.meter import payload_bytes, wire_bytes

T = torch.zeros(300)  # 1200 bytes
THIRDS = AllToAll(torch.zeros(300), (100, 50, 150))


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
)
def test_formulas(request_: Any, rank: Any, payload: Any, wire: Any) -> None:
    assert payload_bytes(request_, rank) == payload
    assert wire_bytes(request_, rank, 3) == pytest.approx(wire)


@pytest.mark.parametrize("request_", [AllReduce(T), AllGather(T), ReduceScatter(T), Broadcast(T)])
def test_one_rank_sends_nothing(request_: Any) -> None:
    assert wire_bytes(request_, 0, 1) == 0


def test_broadcast_and_all_to_all_add_up_over_ranks() -> None:
    assert sum(wire_bytes(Broadcast(T), rank, 3) for rank in range(3)) == pytest.approx(2 * 1200)
    assert sum(wire_bytes(THIRDS, rank, 3) for rank in range(3)) == 2 * 1200


def test_a_conversation_is_counted_with_its_groups_size() -> None:
    world = LockstepWorld(6, local_size=3)

    def body() -> Any:
        yield (AllReduce(T.clone()), AllGather(T))
        yield (AllGather(T, "local"),)
        yield (AllGather(T, "cross"),)

    world.converse("test", [body() for _ in range(6)])
    for meter in world.meters:
        assert meter.payload_bytes == 4 * 1200
        assert meter.wire_bytes == pytest.approx(2 * 1200 * 5 / 6 + 1200 * 5 + 1200 * 2 + 1200 * 1)
        assert meter.rounds == 3


def test_a_broadcasts_payload_is_its_roots_within_the_group() -> None:
    world = LockstepWorld(4, local_size=2)

    def body() -> Any:
        yield (Broadcast(T.clone(), 1, "local"),)

    world.converse("test", [body() for _ in range(4)])
    assert [meter.payload_bytes for meter in world.meters] == [0, 1200, 0, 1200]


def test_a_new_meter_is_empty() -> None:
    meter = TrafficMeter()
    assert (meter.payload_bytes, meter.wire_bytes, meter.dense_wire_bytes, meter.rounds) == (0, 0, 0, 0)
    assert TrafficMeter().seconds is not meter.seconds


def test_dense_is_a_ring_all_reduce_in_fp32() -> None:
    """The dense equivalent is counted in bytes on the wire, too. A single rank sends nothing."""
    for size, expected in ((1, 0.0), (2, 4000.0), (4, 6000.0)):
        meter = TrafficMeter()
        meter.count_dense(1000, size)
        assert meter.dense_wire_bytes == expected == wire_bytes(AllReduce(torch.zeros(1000)), 0, size)


def test_totals_continue_from_a_saved_state() -> None:
    whole, first, second = TrafficMeter(2), TrafficMeter(2), TrafficMeter(2)
    for meter in (whole, first):
        meter.count(AllReduce(torch.zeros(10)), 0, 4)
        meter.count_dense(10, 4)
    second.load_state_dict(first.state_dict())
    for meter in (whole, second):
        meter.count(AllGather(torch.zeros(7)), 0, 4)
        meter.count_dense(10, 4)
    assert second == whole
    with pytest.raises(ValueError, match="not the state of a meter: it has \\['bytes'\\]"):
        second.load_state_dict({"bytes": 1.0})
