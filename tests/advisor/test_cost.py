"""The cost model: recorded bytes are the meter's, and times are the formulas'.

And python -m dgc.advise, for a model of one's own and on paper.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import case
from laws.table import TABLE, Row
from refusals import refuse
from torch import nn

from dgc.advisor.candidates import measure_candidate
from dgc.advisor.command import loss_of_model, main, moved
from dgc.advisor.cost import BucketWork, Compute, Network, RecordedMessage, Traffic, overlapped, predict
from dgc.advisor.cost.computing import AlikeRanks, Planned, fit_computing, machine_of, record_steps, typical
from dgc.advisor.methods import METHODS, builder
from dgc.advisor.paper import WIDEST, candidate_on_paper, shape_of, workload_on_paper
from dgc.advisor.workload import Workload
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.requests import AllGather, AllReduce, Broadcast, Conversation, Exchange, ReduceScatter, Request
from dgc.compression import Compressor, DenseCompressor, DGCCompressor
from dgc.contrib import GTopKCompressor
from dgc.core.bucket import Bucket
from dgc.core.protocol import StatelessCompressor
from dgc.core.results import DenseResult, Reduced
from dgc.core.state import State
from dgc.memory import ResidualMemory
from dgc.testing import LIKE, Fleet, gradients
from dgc.units import RATES, TIMES, human_rate, human_time, quantity

pytestmark = pytest.mark.usefixtures("no_type_checks", "small_caches")
Printed = pytest.CaptureFixture[str]
NETWORK = Network(latency=1e-3, bandwidth=1e6, inner_latency=1e-4, inner_bandwidth=1e7)
ALONE = replace(NETWORK, ranks_per_machine=1)
PAPER, HOSTS = ["--parameters", "350M", "--step", "1.2s"], ["--hosts", "8", "--rate", "1gbit"]
CPU = torch.device("cpu")


def record(plan: Any, size: int, local_size: int = 1) -> Traffic:
    return record_steps(plan, size, local_size)[0]


class Asks(StatelessCompressor):
    def __init__(self, rounds: Callable[[Bucket], Iterable[tuple[Request, ...]]]):
        self.rounds = rounds

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        for requests in self.rounds(bucket):  # noqa: UP028  they are no generator
            yield requests
        return Reduced(DenseResult(), state)

    def plan(self, size: int = 1, rank: int = 0) -> list[tuple[Bucket, Compressor]]:
        return [(Fleet(DenseCompressor, 1, LIKE).buckets[0], self)]


def plan(make: Callable[[], Compressor], size: int, rank: int) -> list[tuple[Bucket, Compressor]]:
    compressor, bucket = make(), Fleet(DenseCompressor, 1).buckets[0]
    for segment, gradient in zip(bucket.segments, gradients(rank, 0), strict=True):
        segment.of(bucket.flat).copy_(gradient)
    return [(bucket, compressor)]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_recorded_bytes_are_those_of_the_meter(row: Row) -> None:
    for size in (2, 3, 4, 8):
        with case(size, "ranks"):
            if size == 3 and row.make().point_to_point:
                refuse("record a power of two of ranks", record, partial(plan, row.make), size)
                continue
            fleet = Fleet(row.make, size)
            fleet.step([gradients(rank, 0) for rank in range(size)])
            meter, traffic = fleet.world.meters[-1], record(partial(plan, row.make), size)
            assert traffic.total("payload") == meter.payload_bytes
            assert traffic.total("wire") == pytest.approx(meter.wire_bytes)


def test_an_early_end_loses_no_message() -> None:
    """More than 8 ranks: the last all-gather is not decoded."""
    makes: dict[str, Any] = {
        exchange: partial(DGCCompressor, 0.01, ResidualMemory(), exchange=exchange)
        for exchange in ("all_gather", "reduce_scatter", "auto")
    }
    makes["gtopk"] = partial(GTopKCompressor, 0.01)
    for exchange, make in makes.items():
        fleet = Fleet(make, 16)
        fleet.step([gradients(rank, 0) for rank in range(16)])
        with case(exchange), pytest.MonkeyPatch.context() as patch:
            patch.setattr("dgc.advisor.cost.computing.DECODED_BYTES", 0)
            traffic = record(partial(plan, make), 16)
            assert traffic.total("wire") == pytest.approx(fleet.world.meters[-1].wire_bytes)
            assert (traffic.decode is None) == (exchange != "gtopk")
            patch.undo()
            assert record(partial(plan, make), 16).buckets == traffic.buckets


def message(kind: str, size: int, payload: int, wire: float, **more: Any) -> RecordedMessage:
    local = more.pop("inner", 1)
    given: dict[str, Any] = {"cross": wire / local if size > local else 0.0, "half": False, "peers": 0, **more}
    return RecordedMessage(kind, size, local, payload, wire, **given)


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
    # 8 ranks on two machines: two of three steps are inside, and a ring's bytes pass the card once
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


GATHERED = message("AllGather", 8, 1000, 7000.0)
THREE_GATHERS = Traffic(8, 1, ((GATHERED, GATHERED), (GATHERED,)), 0.0, None)
SPARSE = partial(plan, lambda: DGCCompressor(0.05, ResidualMemory()))


def test_a_prediction_adds_up_the_messages_with_their_computing() -> None:
    found = predict(THREE_GATHERS, ALONE, Compute(0.1, 0.2, 0.05))
    assert (found.payload_bytes, found.wire_bytes, found.cross_wire_bytes) == (3000, 21000, 21000)
    assert (found.communication, found.compute, found.exchange) == pytest.approx((0.03, 0.7, 0.73))


def test_the_last_message_of_a_predicted_step_overlaps_with_nothing() -> None:
    found = predict(THREE_GATHERS, ALONE, Compute(0.1, 0.2, 0.05))
    steps = found.step(1.0, overlap=False, forward=0.2), found.step(1.0, forward=0.2)
    assert steps == pytest.approx((1.93, 1.91))
    assert predict(THREE_GATHERS, ALONE, Compute(0.1, 0.2, 0.05), (1.0, 1.0)).step(1.0) == pytest.approx(1.7)


def test_computing_is_divided_among_the_buckets_by_their_elements() -> None:
    early, late = predict(replace(THREE_GATHERS, elements=(30, 10)), ALONE, Compute(0.4, 0.8)).buckets
    assert (early.ready, late.ready) == (0.75, 1.0)
    assert early.computing == pytest.approx((0.3, 0.3, 0.3)) and late.computing == pytest.approx((0.1, 0.2))
    assert (early.messages, late.messages) == (pytest.approx((0.01, 0.01)), pytest.approx((0.01,)))


def test_a_bucket_without_messages_computes() -> None:
    silent = predict(replace(THREE_GATHERS, buckets=((), ())), ALONE, Compute(0.1, 0.3))
    assert [bucket.computing for bucket in silent.buckets] == [(0.2,), (0.2,)]


def test_a_prediction_needs_a_time_for_each_bucket() -> None:
    refuse("for each of 2 buckets", predict, THREE_GATHERS, ALONE, Compute(), (1.0,))


def test_an_exchange_of_more_ranks_takes_longer() -> None:
    times = [predict(record(SPARSE, 2**j), ALONE, Compute()).exchange for j in range(1, 13)]
    assert times == sorted(set(times))


def test_an_exchange_with_less_bandwidth_takes_longer() -> None:
    slow, fast = (predict(record(SPARSE, 8), replace(ALONE, bandwidth=of), Compute()) for of in (1e5, 1e6))
    assert slow.exchange > fast.exchange


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
        network, seconds = sum(sum(bucket.messages) for bucket in several), overlapped(3.0, several)
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


def test_messages_of_groups_have_the_bytes_of_the_meter() -> None:
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


def test_broadcasts_of_other_ranks_take_as_long_as_those_of_the_recorded_one() -> None:
    """8 broadcasts of 12.5 MB at 10 GB/s, of which 7 have another root than the recorded rank."""
    trees = tuple(Broadcast(torch.empty(12_500_000, dtype=torch.uint8), root) for root in range(8))
    traffic = record(Asks(lambda bucket: [trees]).plan, 8)
    found = predict(traffic, Network(latency=0.0, bandwidth=10e9), Compute())
    assert traffic.total("payload") == 12_500_000  # as the meter counts: what this rank contributes
    assert found.communication == pytest.approx(8 * 2 * 7 / 8 * 12.5e6 / 10e9)


def test_a_recorded_reduce_scatter_returns_the_share_of_the_rank() -> None:
    ranks = AlikeRanks(4, local_size=2, local_rank=0)  # rank 2 of 4
    assert ranks.point_to_point and ranks.reply(ReduceScatter(torch.arange(8.0))).tolist() == [4.0, 5.0]
    assert ranks.reply(ReduceScatter(torch.arange(8.0), group="cross")).tolist() == [4.0, 5.0, 6.0, 7.0]


def test_the_longest_message_from_rank_to_rank_is_awaited() -> None:
    """Also a message of another round. No rank sends to itself."""
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
    dense = partial(plan, DenseCompressor)
    refuse("local_size must divide", record, dense, 6, 4)
    refuse("2 ranks per machine", predict, record(dense, 4, 2), ALONE, Compute())
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


def make() -> Any:
    """A model with its loss, and a batch, as a user's script has them."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    batch = {"x": torch.randn(8, 64), "y": torch.randint(10, (8,))}
    return model, batch, lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def test_on_paper(tmp_path: Path, capsys: Printed) -> None:
    """A GPT of 350 million parameters on 8 machines: fp16 sends 1.2 GB in 9.8 s, of which 0.8 s hide."""
    file = tmp_path / "advice.json"
    assert main([*PAPER, *HOSTS, "--optimizer", "adamw", "--json", str(file)]) == 0
    out, result = capsys.readouterr().out, json.loads(file.read_text())
    fp16 = result["methods"]["fp16"]
    assert fp16["wire_bytes"] == pytest.approx(2 * 350e6 * 2 * 7 / 8, rel=1e-3)
    assert (fp16["exchange"], fp16["step"]) == pytest.approx((9.8, 10.2), rel=1e-2)
    onebit = result["methods"]["onebit-adam"]
    assert onebit["wire_bytes"] == pytest.approx(350e6 / 8 * 2 * 7 / 8, rel=0.02)  # 1 bit there and 1 bit back
    steps = onebit["compressed_step"], onebit["step"], fp16["step"]
    assert steps[1] == pytest.approx(0.2 * steps[2] + 0.8 * steps[0]) and steps[0] == pytest.approx(1.23, rel=1e-2)
    bits = {name: result["methods"][name]["wire_bytes"] * 8 / (350e6 * 2 * 7 / 8) for name in ("int8", "int4")}
    assert bits == pytest.approx({"int8": 8 + 16 / 256, "int4": 4 + 16 / 128}, rel=2e-3)
    assert result["advice"]["method"] == "int8" and "8 machines of 1 rank" in out and "powersgd-4 1.2" in out
    assert "\n  TwoPhaseCompressor(bits=8)\nNext choice: int4, a step takes 2.97 s" in out
    assert (
        "\n  It lost 0.39 % (0.17) GPT, 300 steps: with two standard errors 0.73 %, over the limit of 0.5 %" in out
    )
    assert "20 % of a run's steps are dense" in out and "(17.4 %)" in out
    assert re.search(r"\nint8 +0.18 % \(0.04\) GPT, 1000 steps .*docs/methods.md#two-phases", out)
    assert "Transformer of 25 layers of width 1088, with adamw" in out
    dgc = {of.name for of in METHODS if of.name.startswith("dgc-")} - {"dgc-adam"}
    assert set(result["left_out"]) == {"2bit-adaptive", "scaled-sign"} | dgc and "UNRELIABLE" not in out
    words = f"--optimizer adamw --methods fp16 onebit-adam --dense-share 0.1 --loss 7% --json {file}"
    assert main([*PAPER, *HOSTS, *words.split()]) == 0
    onebit = json.loads(file.read_text())["methods"]["onebit-adam"]
    assert onebit["step"] == pytest.approx(0.1 * steps[2] + 0.9 * steps[0]) and onebit["dense_share"] == 0.1
    assert "Recommended: onebit-adam, the mean step takes 2.13 s" in capsys.readouterr().out
    assert main([*PAPER, *HOSTS, "--methods", "fp16", "int4", "powersgd-4", "--optimizer", "sgd"]) == 0
    assert "Recommended: powersgd-4" in capsys.readouterr().out


@pytest.mark.parametrize(("loss", "method"), [("0.1%", "fp16"), ("0.5%", "int8"), ("1%", "int4")])
def test_the_limit_of_the_loss_decides_between_8_and_4_bits(loss: str, method: str, capsys: Printed) -> None:
    methods = ["--methods", "fp16", "int8", "int4"]
    assert main([*PAPER, *HOSTS, "--optimizer", "adamw", "--loss", loss, *methods]) == 0
    out = capsys.readouterr().out
    assert ("Do not compress: " if method == "fp16" else f"Recommended: {method}, ") in out


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_method_of_the_advisor_is_built_as_its_usage_says(method: Any) -> None:
    model = nn.Linear(64, 64)
    gradients = {name: torch.ones_like(p) for name, p in model.named_parameters() if method.for_adam}
    optimizer = builder(method, "adamw" if method.for_adam else "sgd", gradients)(model, AlikeRanks(4))
    # vectors are sent by another compressor
    made = [optimizer.method] if method.averages_models else [of.compressor for of in optimizer.planned]
    assert method.usage[0].partition("(")[0] in {type(of).__name__ for of in made}
    optimizer.close()


ON_PAPER, D = shape_of(4_000_000), 2 * WIDEST
ONE_WIDE_LAYER = replace(ON_PAPER, width=D, layers=1, parameters=12 * D**2)
FACTORS = sum(n + m for n, m in ((3 * D, D), (D, D), (4 * D, D), (D, 4 * D)))


def test_a_number_of_parameters_on_paper_is_a_transformer() -> None:
    assert (ON_PAPER.width, ON_PAPER.layers) == (256, 5)


@pytest.mark.parametrize(
    ("name", "of", "nbytes", "rel"),
    [
        ("powersgd-2", ONE_WIDE_LAYER, 2 * 4 * FACTORS, 0.01),
        ("dense", ON_PAPER, 4 * 4e6, 0.02),
        ("dgc-fp32-int64", ON_PAPER, 12 * 0.001 * 4e6, 0.02),
    ],
)
def test_one_narrow_layer_stands_for_the_model_on_paper(name: str, of: Any, nbytes: float, rel: float) -> None:
    """The bytes of each method are the bytes of the layers themselves."""
    (method,) = (method for method in METHODS if method.name == name)
    found = candidate_on_paper(method, "sgd", of, workload_on_paper(of, 1.0, CPU), 4, 1)
    assert found.traffic.total("payload") == pytest.approx(nbytes, rel=rel)
    assert len(found.ready) == len(found.traffic.buckets) and found.ready[-1] == 1.0


def test_a_model_of_ones_own(tmp_path: Path, capsys: Printed) -> None:
    file, names = tmp_path / "advice.json", ["fp16", "dgc-fp16-packed", "powersgd-1", "sgp", "onebit-adam"]
    words = f"--model advisor.test_cost:make --repeats 1 --device cpu --json {file}"
    assert main([*words.split(), *HOSTS, "--methods", *names]) == 0
    out, result = capsys.readouterr().out, json.loads(file.read_text())
    assert set(result["methods"]) == set(names) - {"onebit-adam"} and result["work"]["forward"] > 0
    count = 64 * 256 + 256 + 256 * 10 + 10
    assert "onebit-adam         left out: it is for Adam and AdamW, and the optimizer is sgd" in out
    assert f"model      {count:,} parameters on cpu" in out
    assert result["methods"]["fp16"]["wire_bytes"] == pytest.approx(2 * count * 2 * 7 / 8, rel=0.02)

    # the loss may be what the model returns
    model, x = nn.Module(), torch.ones(2)
    model.forward = lambda x, scale=1.0: scale * x.sum()
    for batch, loss in (((x,), 2), ([x, 3.0], 6), ({"x": x, "scale": 2.0}, 4), (x, 2)):
        assert loss_of_model(model, batch).item() == loss and type(moved(batch, CPU)) is type(batch), batch
    refuse("the model returns no loss; return", loss_of_model, nn.Identity(), x)


def sent(build: Any, model: Any, gradients: Any, steps: int, transport: Any) -> list[float]:
    """The bytes that a rank sends to other machines in each step after the first, which may have more rounds."""
    own = deepcopy(model)
    optimizer, found = build(own, transport), []
    for _ in range(steps):
        optimizer.zero_grad()
        torch.stack([(p * gradients[name]).sum() for name, p in own.named_parameters()]).sum().backward()
        optimizer.step()
        found.append(optimizer.meter.cross_wire_bytes)
    optimizer.zero_grad()
    optimizer.close()
    return [after - before for before, after in pairwise(found)]


def test_a_machine_sends_what_its_ranks_send() -> None:
    """2 machines of 8 ranks. Shares of local ranks differ or are empty; SGP's peers depend on rank and round."""
    # like the sizes of VGG-16: one tensor has three quarters of all elements
    shapes = [(128, 196), (4096,), (16, 16, 3, 3), (128, 32), (100,)]
    names = ("dgc-fp32-int64", "scaled-sign", "powersgd-2", "sgp")
    for method, some in product([of for of in METHODS if of.name in names], (shapes, shapes[:1])):
        with case(method.name, len(some)):
            steps = 5 if method.averages_models else 2  # the graph of 16 ranks has 4 rounds
            torch.manual_seed(0)
            model, build = nn.ParameterList(map(torch.randn, some)), builder(method, "sgd", {})
            gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
            ranks = LockstepWorld(16, 8).run(partial(sent, build, model, gradients, steps))[8:]
            workload = Workload(model, loss_of_model, "", 1.0, 1.0, dict.fromkeys(gradients, 1.0), [], [gradients])
            found = measure_candidate(method, build, workload, 16, 8, 1).predict(Network(0.0, 1e6, 8, 0.0, 1e12))
            assert found.machine_wire_bytes == pytest.approx(sum(map(sum, ranks)) / (steps - 1))
            assert found.communication >= found.machine_wire_bytes / 1e6 and len({tuple(of) for of in ranks}) > 1


def test_bad_input_is_one_message(capsys: Printed) -> None:
    own = ["--model", "torch.nn:Identity", *HOSTS]
    for given, message in (
        (HOSTS, "give --parameters and --step for a prediction on paper, or --model"),
        ([*PAPER, *own], "give --parameters and --step"),
        (["--parameters", "350M", *HOSTS], "--parameters and --step go together"),
        (["--parameters", "many", "--step", "1s", *HOSTS], "--parameters is 'many': write a number and a unit"),
        (["--parameters", "12", "--step", "1s", *HOSTS], "--parameters is '12'; it must be from 100k to 10t"),
        (["--parameters", "1B", "--step", "fast", *HOSTS], "--step is 'fast'"),
        (PAPER, "there is no network"),
        (["--model", "no_colon", *HOSTS], "write MODULE:FUNCTION"),
        (["--model", "no.such:thing", *HOSTS], "--model no.such:thing: No module named"),
        (["--model", "json:nothing", *HOSTS], "has no attribute 'nothing'"),
        (["--model", "json:__doc__", *HOSTS], "__doc__ is not a function"),
        (own, "the function must return (model, batch)"),
        ([*own, "--device", "abacus"], "--device abacus"),
        ([*PAPER, *HOSTS, "--dense-share", "1"], "--dense-share is 1.0; it must be at least 0 and below 1"),
        ([*PAPER, *HOSTS, "--json", "."], "--json: . is a folder; name a file"),
        (["--model", "../test_cost:make", *HOSTS], "'../test_cost' is no name of a module"),
    ):
        assert main(given) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("advise: ") and message in printed.err and printed.out == "", message


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--parameters", ("0", "1e400", "1e-400", "99t")),
        ("--step", ("0s", "1e400s", "1e-400s", "1e7s")),
        ("--rate", ("0gbit", "1e400gbit", "1e-400gbit", "1e9tbit")),
        ("--inner-rate", ("0gbit", "1e400gbit")),
        ("--latency", ("1e400s", "101s")),
        ("--hosts", ("0", "-1", "1000000", "1" + 30 * "0")),
        ("--ranks-per-host", ("0", "100000", "16384")),
        ("--repeats", ("0", "-1", "1" + 30 * "0")),
        ("--dense-share", ("nan", "inf", "1e400", "-1e-9")),
    ],
)
def test_a_number_out_of_range_is_one_message_before_any_work(
    option: str, values: Sequence[str], capsys: Printed
) -> None:
    for value in values:
        with case(value):
            assert main([*PAPER, *HOSTS, "--ranks-per-host", "2", f"{option}={value}"]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"advise: {option} ") and "it must be" in line


def test_the_number_of_ranks_on_paper_is_bounded(capsys: Printed) -> None:
    assert main([*PAPER, "--rate", "1gbit", "--hosts", "16384", "--ranks-per-host", "2"]) == 2
    assert "--hosts times --ranks-per-host is 32768; it must be at most 16384" in capsys.readouterr().err


def without_parameters() -> Any:
    return nn.ReLU(), torch.ones(2), lambda model, batch: model(batch).sum()


def frozen() -> Any:
    return nn.Linear(2, 2).requires_grad_(False), torch.ones(2), lambda model, batch: model(batch).sum()


def with_a_loss_that_is_nan() -> Any:
    return nn.Linear(2, 2), torch.ones(2), lambda model, batch: model(batch).sum() * torch.nan


def with_a_gradient_that_is_nan() -> Any:
    return nn.Linear(2, 2), torch.zeros(2), lambda model, batch: (model(batch).sum() * 0).sqrt()


def with_a_detached_loss() -> Any:
    return nn.Linear(2, 2), torch.ones(2), lambda model, batch: model(batch).sum().detach()


def with_several_losses() -> Any:
    return nn.Linear(2, 2), torch.ones(2), lambda model, batch: model(batch)


def that_raises() -> Any:
    raise KeyError("no data")


def with_another_batch() -> Any:
    return nn.Linear(2, 2), torch.ones(3), lambda model, batch: model(batch).sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("without_parameters", "the model has no parameter that requires a gradient"),
        ("frozen", "the model has no parameter that requires a gradient"),
        ("with_a_loss_that_is_nan", "the loss of the first batch is nan"),
        ("with_a_gradient_that_is_nan", "the gradient of weight is not finite in the first step"),
        ("with_a_detached_loss", "the loss depends on no parameter"),
        ("with_several_losses", "the loss is a Tensor of shape (2,), not a tensor of one element"),
        ("that_raises", "KeyError: 'no data' ("),
        ("with_another_batch", "RuntimeError: "),
    ],
)
def test_work_that_cannot_be_measured_is_one_message(function: str, message: str, capsys: Printed) -> None:
    assert main(["--model", f"advisor.test_cost:{function}", "--repeats", "1", "--device", "cpu", *HOSTS]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"advise: --model advisor.test_cost:{function}: {message}")
    assert "Error: " not in error or f"{__file__}, line " in error


def test_quantities() -> None:
    rates = {"1gbit": 1e9, "2.5 Gbit/s": 2.5e9, "100mbit": 1e8, "1e3kbit": 1e6}
    valid_rate, valid_time = ("1kbit", "10tbit"), ("0s", "1s")
    assert {text: quantity(text, RATES, "--rate", valid_rate) for text in rates} == rates
    assert quantity("50us", TIMES, "--latency", valid_time) == pytest.approx(5e-5)
    refuse(
        "--rate is '10MB': write a number and a unit of bit, kbit", quantity, "10MB", RATES, "--rate", valid_rate
    )
    for text in ("50", "us", "1.2.3us", "-1us", ""):
        refuse(f"--latency is '{text}': write a number and a unit", quantity, text, TIMES, "--latency", valid_time)
    for text in ("1001ms", "1e400s"):
        refuse(f"'{text}'; it must be from 0s to 1s", quantity, text, TIMES, "--latency", valid_time)
    assert [human_rate(of) for of in (1.25e10, 1.25e5, 12.0)] == ["100 Gbit/s", "1 Mbit/s", "96 bit/s"]
    assert [human_time(seconds) for seconds in (0.0, 5e-5, 9.996e-4)] == ["0.00 us", "50.0 us", "1.00 ms"]
    assert [human_time(seconds) for seconds in (0.6319, 0.9996, 19.6)] == ["632 ms", "1.00 s", "19.6 s"]
