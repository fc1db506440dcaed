"""The cost model: recorded bytes are those of the meter, and times are those of the formulas."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import case
from laws.test_laws import TABLE, Row

from dgc.bucket import Bucket
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.requests import AllGather, AllReduce, Conversation, Exchange
from dgc.compression import Compressor, DenseCompressor, DGCCompressor
from dgc.compression.protocol import DenseResult, Result, StatelessCompressor, uses_point_to_point
from dgc.cost import Compute, Message, Network, Traffic, predict, record
from dgc.memory import ResidualMemory
from dgc.testing import LIKE, Fleet, gradients

NETWORK = Network(latency=1e-3, bandwidth=1e6, inner_latency=1e-4, inner_bandwidth=1e7)
ALONE = replace(NETWORK, ranks_per_machine=1)


def planned(make: Callable[[], Compressor]) -> Callable[[int, int], Sequence[tuple[Bucket, Compressor]]]:
    """A plan of one bucket with the gradients of the rank."""

    def plan(size: int, rank: int) -> list[tuple[Bucket, Compressor]]:
        compressor, bucket = make(), Fleet(DenseCompressor, 1).buckets[0]
        compressor.plan(bucket, size, rank)
        for segment, gradient in zip(bucket.segments, gradients(rank, 0), strict=True):
            segment.of(bucket.flat).copy_(gradient)
        return [(bucket, compressor)]

    return plan


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_recorded_bytes_are_those_of_the_meter(row: Row, no_type_checks: None) -> None:
    for size in (2, 3, 4, 8):
        with case(size, "ranks"):
            if size == 3 and uses_point_to_point(row.make()):
                with pytest.raises(ValueError, match="record a power of two of ranks"):
                    record(planned(row.make), size)
                continue
            fleet = Fleet(row.make, size)
            fleet.step([gradients(rank, 0) for rank in range(size)])
            meter, traffic = fleet.world.meters[-1], record(planned(row.make), size)
            assert traffic.total("payload") == meter.payload_bytes
            assert traffic.total("wire") == pytest.approx(meter.wire_bytes)


def test_an_early_end_loses_no_message(no_type_checks: None) -> None:
    """More than 8 ranks: the last all-gather is not decoded."""
    for exchange in ("all_gather", "reduce_scatter", "gtopk", "auto"):
        with case(exchange):

            def make(exchange: str = exchange) -> Compressor:
                return DGCCompressor(0.01, ResidualMemory(), exchange=exchange)

            fleet = Fleet(make, 16)
            fleet.step([gradients(rank, 0) for rank in range(16)])
            traffic = record(planned(make), 16, decoded_bytes=0)
            assert traffic.total("wire") == pytest.approx(fleet.world.meters[-1].wire_bytes)
            assert (traffic.decode is None) == (exchange != "gtopk")
            assert record(planned(make), 16).buckets == traffic.buckets


def message(kind: str, size: int, payload: int, wire: float, **more: Any) -> Message:
    local = more.pop("inner", 1)
    given: dict[str, Any] = {"cross": wire / local if size > local else 0.0, "half": False, "peers": 0, **more}
    return Message(kind, size, local, payload, wire, **given)


def test_seconds_of_collectives_by_hand() -> None:
    """8 ranks on 8 machines: 1 ms per message and 1 MB/s."""
    seconds = {
        ("AllReduce", 8_000_000, 14_000_000.0): 0.006 + 14,  # Rabenseifner
        ("AllReduce", 8, 14.0): 3 * (0.001 + 8e-6),  # recursive doubling
        ("AllGather", 1000, 7000.0): 0.003 + 0.007,
        ("ReduceScatter", 8000, 7000.0): 0.003 + 0.007,
        ("Broadcast", 8_000_000, 7_000_000.0): 0.003 + 0.007 + 14,
        ("Broadcast", 8, 7.0): 3 * (0.001 + 8e-6),
    }
    for (kind, payload, wire), expected in seconds.items():
        with case(kind, payload):
            assert message(kind, 8, payload, wire).seconds(ALONE, 1) == pytest.approx(expected)
    assert message("AllToAll", 8, 8000, 7000.0, peers=7).seconds(ALONE, 1) == pytest.approx(0.014)
    assert message("Exchange", 8, 0, 0.0, awaited=5000).seconds(ALONE, 1) == pytest.approx(0.006)
    assert message("AllReduce", 1, 8, 0.0).seconds(ALONE, 1) == 0


def test_seconds_of_reductions() -> None:
    network = replace(ALONE, reduction=1e-6, half_reduction=3e-6)
    for half, added in ((False, 7.0), (True, 21.0)):
        found = message("AllReduce", 8, 8_000_000, 14e6, half=half).seconds(network, 1)
        assert found == pytest.approx(0.006 + 14 + added)


def test_two_levels() -> None:
    """8 ranks on two machines: two of three steps are inside, and a ring's bytes pass the card once."""
    network = replace(NETWORK, ranks_per_machine=4)
    gathered = message("AllGather", 8, 1000, 7000.0, inner=4)
    assert gathered.seconds(network, 4) == pytest.approx(2e-4 + 1e-3 + 7e-3)
    inside = message("AllGather", 4, 1000, 3000.0, inner=4)
    assert inside.seconds(network, 4) == pytest.approx(2e-4 + 3e-4)
    across = message("AllGather", 2, 1000, 1000.0)  # four groups of two share each card
    assert across.seconds(network, 4) == pytest.approx(1e-3 + 4e-3)
    memory = replace(network, machine_bandwidth=1e6)
    assert inside.seconds(memory, 4) == pytest.approx(2e-4 + 12e-3)


def test_a_prediction_adds_messages_and_computing() -> None:
    gathered = message("AllGather", 8, 1000, 7000.0)
    traffic = Traffic(8, 1, ((gathered, gathered), (gathered,)), 0.0, None)
    found = predict(traffic, ALONE, Compute(0.1, 0.2, 0.05))
    assert (found.payload_bytes, found.wire_bytes, found.cross_wire_bytes) == (3000, 21000, 21000)
    assert found.communication == pytest.approx(0.03)
    assert found.compute == pytest.approx(0.7)
    assert found.exchange == pytest.approx(0.73)
    assert found.step(1.0, overlap=False) == pytest.approx(1.73)
    assert found.step(1.0) == pytest.approx(1.7)  # half of backward hides all of the communication
    assert found.step(0.04) == pytest.approx(0.75)


def test_ranks_that_share_cores_compute_longer() -> None:
    network = replace(NETWORK, ranks_per_machine=8, cores=2)
    assert [network.slowdown(size) for size in (1, 2, 4, 16)] == [1, 1, 2, 4]
    assert NETWORK.slowdown(8) == 1


def test_more_ranks_take_longer_and_less_bandwidth_too(no_type_checks: None) -> None:
    plan, nothing = planned(lambda: DGCCompressor(0.05, ResidualMemory())), Compute()
    times = [predict(record(plan, 2**j), ALONE, nothing).exchange for j in range(1, 13)]
    assert times == sorted(set(times))
    slow = predict(record(plan, 8), replace(ALONE, bandwidth=1e5), nothing)
    assert slow.exchange > times[2]


class Groups(StatelessCompressor):
    """Uses all groups."""

    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        yield (AllReduce(torch.ones(4), group="local"),)
        yield (AllReduce(torch.ones(4)),)
        yield (AllGather(torch.ones(3), group="cross"),)
        return DenseResult()


def test_groups_are_those_of_the_meter() -> None:
    world = LockstepWorld(6, 3)
    for meter in world.meters:
        meter.local_size = 3
    bucket = Fleet(DenseCompressor, 1, LIKE).buckets[0]
    world.converse("groups", [Groups().reduce(bucket) for _ in range(6)])
    traffic = record(lambda size, rank: [(bucket, Groups())], 6, 3)
    assert traffic.total("wire") == pytest.approx(world.meters[-1].wire_bytes)
    assert traffic.total("cross") == pytest.approx(world.meters[-1].cross_wire_bytes)


class Listener(StatelessCompressor):
    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        yield (Exchange({}, {0: torch.empty(5)}),)
        return DenseResult()


def test_bad_input_is_refused() -> None:
    for name, value in (("bandwidth", 0.0), ("latency", -1.0), ("inner_bandwidth", -1.0), ("cores", 0)):
        with pytest.raises(ValueError, match=f"Network: {name} must be"):
            Network(**{"latency": 1e-3, "bandwidth": 1e6, name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="do not fill machines of 4"):
        replace(NETWORK, ranks_per_machine=4).local_size(6)
    with pytest.raises(ValueError, match="local_size must divide"):
        record(planned(DenseCompressor), 6, 4)
    traffic = record(planned(DenseCompressor), 4, 2)
    with pytest.raises(ValueError, match="2 ranks per machine"):
        predict(traffic, ALONE, Compute())
    bucket = Fleet(DenseCompressor, 1, LIKE).buckets[0]
    with pytest.raises(ValueError, match="the reply cannot be made"):
        record(lambda size, rank: [(bucket, Listener())], 2)
