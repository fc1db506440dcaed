"""The cost model: recorded bytes are those of the meter, and times are those of the formulas."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cases import case
from laws.table import TABLE, Row
from refusals import refuse

from dgc.bucket import Bucket
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.requests import AllGather, AllReduce, Broadcast, Conversation, Exchange, ReduceScatter, Request
from dgc.compression import Compressor, DenseCompressor, DGCCompressor
from dgc.compression.protocol import DenseResult, Reduced, StatelessCompressor
from dgc.cost import BucketWork, Compute, Message, Network, Traffic, overlapped, predict
from dgc.cost.computing import AlikeRanks, fit_computing, machine_of, record_steps, typical
from dgc.memory import ResidualMemory
from dgc.state import State
from dgc.testing import LIKE, Fleet, gradients

pytestmark = pytest.mark.usefixtures("no_type_checks")
NETWORK = Network(latency=1e-3, bandwidth=1e6, inner_latency=1e-4, inner_bandwidth=1e7)
ALONE = replace(NETWORK, ranks_per_machine=1)
Planned = Sequence[tuple[Bucket, Compressor]]


def record(plan: Any, size: int, local_size: int = 1) -> Traffic:
    return record_steps(plan, size, local_size)[0]


class Asks(StatelessCompressor):
    """Makes the requests of these rounds, whatever the bucket."""

    def __init__(self, rounds: Callable[[Bucket], Iterable[tuple[Request, ...]]]):
        self.rounds = rounds

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        for requests in self.rounds(bucket):  # noqa: UP028  they are no generator
            yield requests
        return Reduced(DenseResult(), state)

    def plan(self, size: int = 1, rank: int = 0) -> Planned:
        return [(Fleet(DenseCompressor, 1, LIKE).buckets[0], self)]


def planned(make: Callable[[], Compressor]) -> Callable[[int, int], Planned]:
    def plan(size: int, rank: int) -> Planned:
        compressor, bucket = make(), Fleet(DenseCompressor, 1).buckets[0]
        for segment, gradient in zip(bucket.segments, gradients(rank, 0), strict=True):
            segment.of(bucket.flat).copy_(gradient)
        return [(bucket, compressor)]

    return plan


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_recorded_bytes_are_those_of_the_meter(row: Row) -> None:
    for size in (2, 3, 4, 8):
        with case(size, "ranks"):
            if size == 3 and row.make().point_to_point:
                refuse("record a power of two of ranks", record, planned(row.make), size)
                continue
            fleet = Fleet(row.make, size)
            fleet.step([gradients(rank, 0) for rank in range(size)])
            meter, traffic = fleet.world.meters[-1], record(planned(row.make), size)
            assert traffic.total("payload") == meter.payload_bytes
            assert traffic.total("wire") == pytest.approx(meter.wire_bytes)


def test_an_early_end_loses_no_message() -> None:
    """More than 8 ranks: the last all-gather is not decoded."""
    for exchange in ("all_gather", "reduce_scatter", "gtopk", "auto"):
        make = partial(DGCCompressor, 0.01, ResidualMemory(), exchange=exchange)
        fleet = Fleet(make, 16)
        fleet.step([gradients(rank, 0) for rank in range(16)])
        with case(exchange), pytest.MonkeyPatch.context() as patch:
            patch.setattr("dgc.cost.computing.DECODED_BYTES", 0)
            traffic = record(planned(make), 16)
            assert traffic.total("wire") == pytest.approx(fleet.world.meters[-1].wire_bytes)
            assert (traffic.decode is None) == (exchange != "gtopk")
            patch.undo()
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
    assert {of: message(of[0], 8, *of[1:]).seconds(ALONE, 1) for of in seconds} == pytest.approx(seconds)
    assert message("AllToAll", 8, 8000, 7000.0, peers=7).seconds(ALONE, 1) == pytest.approx(0.014)
    assert message("Exchange", 8, 0, 0.0, awaited=5000).seconds(ALONE, 1) == pytest.approx(0.006)
    assert message("AllReduce", 1, 8, 0.0).seconds(ALONE, 1) == 0
    network = replace(ALONE, reduction=1e-6, half_reduction=3e-6)
    times = [message("AllReduce", 8, 8_000_000, 14e6, half=half).seconds(network, 1) for half in (False, True)]
    assert times == pytest.approx([14.006 + 7, 14.006 + 21])


def test_two_levels() -> None:
    """8 ranks on two machines: two of three steps are inside, and a ring's bytes pass the card once."""
    network = replace(NETWORK, ranks_per_machine=4)
    assert message("AllGather", 8, 1000, 7000.0, inner=4).seconds(network, 4) == pytest.approx(2e-4 + 1e-3 + 7e-3)
    inside = message("AllGather", 4, 1000, 3000.0, inner=4)
    assert inside.seconds(network, 4) == pytest.approx(2e-4 + 3e-4)
    across = message("AllGather", 2, 1000, 1000.0)  # four groups of two share each card
    assert across.seconds(network, 4) == pytest.approx(1e-3 + 4e-3)
    assert inside.seconds(replace(network, machine_bandwidth=1e6), 4) == pytest.approx(2e-4 + 12e-3)
    # ranks that share cores compute longer
    shared = replace(NETWORK, ranks_per_machine=8, cores=2)
    assert [shared.slowdown(size) for size in (1, 2, 4, 16)] == [1, 1, 2, 4] and NETWORK.slowdown(8) == 1
    assert (Network(1e-3, 1e6).inner_latency, Network(1e-3, 1e6).inner_bandwidth) == (2e-6, 10e9)


def test_a_prediction_adds_messages_and_computing() -> None:
    gathered = message("AllGather", 8, 1000, 7000.0)
    traffic = Traffic(8, 1, ((gathered, gathered), (gathered,)), 0.0, None)
    found = predict(traffic, ALONE, Compute(0.1, 0.2, 0.05))
    assert (found.payload_bytes, found.wire_bytes, found.cross_wire_bytes) == (3000, 21000, 21000)
    assert (found.communication, found.compute, found.exchange) == pytest.approx((0.03, 0.7, 0.73))
    steps = found.step(1.0, overlap=False, forward=0.2), found.step(1.0, forward=0.2)
    assert steps == pytest.approx((1.93, 1.91))  # the last message overlaps with nothing
    assert predict(traffic, ALONE, Compute(0.1, 0.2, 0.05), (1.0, 1.0)).step(1.0) == pytest.approx(1.7)
    early, late = predict(replace(traffic, elements=(30, 10)), ALONE, Compute(0.4, 0.8)).buckets
    assert (early.ready, late.ready) == (0.75, 1.0)
    assert early.computing == pytest.approx((0.3, 0.3, 0.3)) and late.computing == pytest.approx((0.1, 0.2))
    assert (early.messages, late.messages) == (pytest.approx((0.01, 0.01)), pytest.approx((0.01,)))
    silent = predict(replace(traffic, buckets=((), ())), ALONE, Compute(0.1, 0.3))
    assert [bucket.computing for bucket in silent.buckets] == [(0.2,), (0.2,)]
    refuse("for each of 2 buckets", predict, traffic, ALONE, Compute(), (1.0,))
    # more ranks take longer, and less bandwidth too
    plan = planned(lambda: DGCCompressor(0.05, ResidualMemory()))
    times = [predict(record(plan, 2**j), ALONE, Compute()).exchange for j in range(1, 13)]
    assert times == sorted(set(times))
    assert predict(record(plan, 8), replace(ALONE, bandwidth=1e5), Compute()).exchange > times[2]


def test_overlap_by_hand() -> None:
    """Backward of 10 s. The comments have the times at which each part ends."""
    cases = {
        "nothing": ((), 10.0),
        "hidden": ((BucketWork(0.5, (0, 0), (4,)),), 10.0),  # ready 5, sent 9
        "a tail": ((BucketWork(0.5, (0, 0), (7,)),), 12.0),  # ready 5, sent 12
        "the last bucket is not hidden": ((BucketWork(1, (0, 0), (3,)),), 13.0),
        "computing delays backward": ((BucketWork(0.5, (1, 2), (1,)),), 13.0),  # 1 s and 2 s of computing
        "a queue for the network": ((BucketWork(0.1, (0, 0), (8,)), BucketWork(0.2, (0, 0), (8,))), 17.0),
        # encoded 6, sent 8, decoded 9 while backward waits: its second half lasts from 6 to 8 and 9 to 12
        "both in turns": ((BucketWork(0.5, (1, 1), (2,)),), 12.0),
        # first: encoded 6, sent 12; backward until 11; second: ready 11, encoded 12, sent 14; first decoded 13
        "two at the end": ((BucketWork(0.5, (1, 1), (6,)), BucketWork(1, (1, 1), (2,))), 15.0),
        # two rounds: sent 11, computed 12, sent 13, decoded 13.5
        "two rounds": ((BucketWork(1, (0, 1, 0.5), (1, 1)),), 13.5),
        "without messages": ((BucketWork(0.3, (2,), ()),), 12.0),
    }
    for name, (buckets, expected) in cases.items():
        assert overlapped(10.0, buckets) == pytest.approx(expected), name
    assert overlapped(0.0, [BucketWork(1, (1, 1), (2,))]) == 4
    # it is between its limits
    for draws in torch.rand(50, 4, 6, generator=torch.Generator().manual_seed(0)).tolist():
        several = [BucketWork(at, (a, b, c), (x, y)) for at, a, b, c, x, y in draws]
        computing = sum(sum(bucket.computing) for bucket in several)
        network = sum(sum(bucket.messages) for bucket in several)
        seconds = overlapped(3.0, several)
        assert max(3.0 + computing, network) <= seconds <= 3.0 + computing + network
        less = [replace(bucket, messages=tuple(s / 2 for s in bucket.messages)) for bucket in several]
        assert overlapped(3.0, less) <= seconds + network / 2


def test_steps_are_recorded_with_the_state_of_those_before() -> None:
    seen: list[float] = []

    def rounds(bucket: Bucket) -> Iterator[tuple[Request, ...]]:
        seen.append(float(bucket.flat[0]))
        yield (AllGather(torch.zeros(len(seen), dtype=torch.uint8)),)

    def refill(planned: Planned, step: int) -> None:
        planned[0][0].flat.fill_(10.0 + step)

    traffics = record_steps(Asks(rounds).plan, 2, steps=3, refill=refill)
    assert seen == [10, 11, 12] and [traffic.total("payload") for traffic in traffics] == [1, 2, 3]
    assert traffics[0].elements == (Asks(rounds).plan()[0][0].numel,)
    refuse("2 steps need a function", record_steps, Asks(rounds).plan, 2, steps=2)


def test_groups_are_those_of_the_meter() -> None:
    four = torch.ones(4)
    several = (AllReduce(four, group="local"),), (AllReduce(four),), (AllGather(torch.ones(3), "cross"),)
    asks = Asks(lambda bucket: several)
    world, ((bucket, groups),) = LockstepWorld(6, 3), asks.plan()
    for meter in world.meters:
        meter.local_size = 3
    world.converse("groups", [groups.reduce(bucket, State(6, rank)) for rank in range(6)])
    traffic = record(asks.plan, 6, 3)
    assert traffic.total("wire") == pytest.approx(world.meters[-1].wire_bytes)
    assert traffic.total("cross") == pytest.approx(world.meters[-1].cross_wire_bytes)


def test_messages_of_single_ranks() -> None:
    # 8 broadcasts of 12.5 MB at 10 GB/s, of which 7 have another root than the recorded rank and take as long
    trees = tuple(Broadcast(torch.empty(12_500_000, dtype=torch.uint8), root) for root in range(8))
    traffic = record(Asks(lambda bucket: [trees]).plan, 8)
    found = predict(traffic, Network(latency=0.0, bandwidth=10e9), Compute())
    assert traffic.total("payload") == 12_500_000  # that of the meter: what this rank contributes
    assert found.communication == pytest.approx(8 * 2 * 7 / 8 * 12.5e6 / 10e9)
    # a reduce-scatter returns the share of the rank, 2 of 4
    ranks = AlikeRanks(4, local_size=2, local_rank=0)
    assert ranks.point_to_point and ranks.reply(ReduceScatter(torch.arange(8.0))).tolist() == [4.0, 5.0]
    assert ranks.reply(ReduceScatter(torch.arange(8.0), group="cross")).tolist() == [4.0, 5.0, 6.0, 7.0]
    # the longest message from rank to rank is awaited, also what another round sent; the recorded rank, the last
    # one, sends nothing to itself
    first = Exchange({0: torch.ones(5), 1: torch.ones(9)}, {0: torch.empty(5)})
    second = Exchange({0: torch.ones(3)}, {0: torch.empty(5)})
    (messages,) = record(Asks(lambda bucket: [(first,), (second,)]).plan, 2).buckets
    assert [(of.awaited, of.peers) for of in messages] == [(20, 1), (20, 1)]


def test_ranks_of_a_machine_are_joined_round_by_round() -> None:
    """The slowest rank's computing counts, and what its ranks send between machines at the same time is added."""
    inside = message("AllToAll", 2, 100, 50.0, inner=2)
    first, second = message("AllReduce", 4, 8, 12.0), message("AllReduce", 4, 4, 6.0)
    last = message("AllGather", 2, 16, 16.0, inner=2)
    one = Traffic(8, 2, ((inside, first, second, last),), 1.0, 5.0)
    other = Traffic(8, 2, ((replace(inside, awaited=70), second, replace(last, wire=18.0)),), 2.0, 4.0)
    for ranks in ([one, other], [other, one]):
        (joined,), found = machine_of(ranks).buckets, machine_of(ranks)
        assert (found.encode, found.decode) == (2.0, 5.0)
        assert [of.kind for of in joined] == ["AllToAll", "AllReduce", "AllReduce", "AllGather"]
        assert [of.wire for of in joined] == [50.0, 12.0, 6.0, 18.0] and joined[0].awaited == 70
        assert [of.leaving(2) for of in joined] == [0.0, 18.0, 6.0, 0.0]
        assert joined[1].seconds(Network(0.0, 1.0, 2, 0.0, 1e9), 2) == pytest.approx(18.0)  # both share the card
    assert machine_of([one, replace(other, decode=None)]).decode is None
    # the rank with the largest share of an all-to-all receives more than any sends
    assert replace(inside, awaited=70).seconds(Network(0.0, 1.0, 2, 0.0, 1.0), 2) == pytest.approx(70.0)


def test_bad_input_is_refused() -> None:
    for name, value in (("bandwidth", 0.0), ("latency", -1.0), ("inner_bandwidth", -1.0), ("cores", 0)):
        refuse(f"Network: {name} must be", Network, **{"latency": 1e-3, "bandwidth": 1e6, name: value})
    refuse("do not fill machines of 4", replace(NETWORK, ranks_per_machine=4).local_size, 6)
    refuse("local_size must divide", record, planned(DenseCompressor), 6, 4)
    refuse("2 ranks per machine", predict, record(planned(DenseCompressor), 4, 2), ALONE, Compute())
    from_rank_0 = Exchange({}, {0: torch.empty(5)})
    refuse("the reply cannot be made", record, Asks(lambda bucket: [(from_rank_0,)]).plan, 2)
    refuse("1 messages need 2 times", BucketWork, 0.5, (1.0,), (1.0,))
    refuse("from 0 to 1, not 1.5", BucketWork, 1.5, (1.0,), ())


def test_the_time_of_decoding_is_a_line_of_the_ranks() -> None:
    def fitted_to(*decode: float) -> tuple[float, float, float]:
        runs = [Traffic(size, 1, (), 0.5, seconds) for size, seconds in zip((2, 4, 8), decode, strict=True)]
        found = fit_computing(runs)
        return found.encode, found.decode, found.per_rank

    assert fitted_to(5.0, 9.0, 17.0) == pytest.approx((0.5, 1.0, 2.0))
    assert fitted_to(3.0, 2.0, 1.0) == pytest.approx((0.5, 2.0, 0.0))  # more ranks do not take less
    assert fitted_to(1.0, 3.0, 7.0)[1] == pytest.approx(0.0)  # nor does decoding begin below 0
    refuse("two or more numbers of ranks", fit_computing, [Traffic(2, 1, (), 0.5, 1.0)])
    reduced = ((message("AllReduce", 2, 8, 8.0),),)
    runs = [Traffic(size, 1, reduced, 0.5, seconds) for size, seconds in ((2, 5.0), (4, 9.0))]
    assert (fit_computing(runs).decode, fit_computing(runs).per_rank) == (7.0, 0.0)
    # of several exchanges the median counts
    runs = [Traffic(2, 1, (), float(i), 2.0 * i) for i in (9, 1, 4)]
    assert typical(runs) == Traffic(2, 1, (), 4.0, 8.0)
    refuse("1 of 4 exchanges were not decoded", typical, [*runs, Traffic(2, 1, (), 1.0, None)])
