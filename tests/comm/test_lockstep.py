"""The lockstep transport: expected replies, groups, requests that do not match, threads that fail or end early."""

import threading
import time
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from environment import patient
from optim.nets import alone, same
from torch import Tensor

from dgc import comm
from dgc.comm import all_gather_object, all_reduce, barrier, broadcast_object
from dgc.comm.lockstep import LockstepError, LockstepWorld
from dgc.comm.requests import Group, Request

ONE = torch.ones(2)


def ask(request: Request) -> Any:
    (reply,) = yield (request,)
    return reply


def converse(world: Any, requests: Any) -> Any:
    return world.converse("test", [ask(request) for request in requests])


def total(transport: Any, name: str, value: float, communicator: str = "") -> Any:
    """Launches a sum over ranks. Returns its work."""
    return transport.launch(name, (comm.AllReduce(torch.tensor([float(value)]), "sum"),), communicator)


def wait(transport: Any, work: Any) -> float:
    return transport.wait(work)[0].item()


def noting() -> Any:
    """A transport of one rank that keeps the names of launches."""
    transport = alone()
    transport.launched, launch = [], transport.launch
    transport.launch = lambda name, *given: transport.launched.append(name) or launch(name, *given)
    return transport


SIZES = (1, 2, 3, 5)
REDUCTIONS: dict[str, Any] = {"sum": Tensor.sum, "mean": Tensor.mean, "min": Tensor.amin, "max": Tensor.amax}


def tensors(size: int) -> list[Tensor]:
    return [*torch.randn(size, 4 * size, generator=torch.Generator().manual_seed(size))]


def replies(own: list[Tensor], request: Any, *options: Any) -> Any:
    return converse(LockstepWorld(len(own)), [request(t.clone(), *options) for t in own])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", REDUCTIONS)
def test_every_rank_gets_the_same_bits_of_a_reduction(op: str, size: int) -> None:
    own = tensors(size)
    first, *others = replies(own, comm.AllReduce, op)
    torch.testing.assert_close(first, REDUCTIONS[op](torch.stack(own), 0))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("size", SIZES)
def test_an_all_gather_gives_every_rank_the_tensors_of_all(size: int) -> None:
    own = tensors(size)
    assert all(isinstance(reply, tuple) and same(reply, own) for reply in replies(own, comm.AllGather))


@pytest.mark.parametrize("size", SIZES)
def test_a_reduce_scatter_gives_each_rank_its_share_of_the_sum(size: int) -> None:
    own = tensors(size)
    shares = replies(own, comm.ReduceScatter, "sum")
    torch.testing.assert_close(torch.cat(shares), torch.stack(own).sum(0))
    assert all(share.numel() == 4 for share in shares)


def test_a_reduce_scatter_of_unequal_shares_is_refused() -> None:
    with pytest.raises(LockstepError):
        converse(LockstepWorld(2), [comm.ReduceScatter(torch.ones(5)) for _ in range(2)])


@pytest.mark.parametrize("size", SIZES)
def test_a_broadcast_gives_every_rank_the_tensor_of_the_root(size: int) -> None:
    own = tensors(size)
    for root in (0, size - 1):
        assert all(torch.equal(reply, own[root]) for reply in replies(own, comm.Broadcast, root))


def test_a_launched_tensor_becomes_nan() -> None:
    """It belongs to the transport: Horovod writes the reply into it."""
    launched = [torch.ones(3) for _ in range(2)]
    sums = converse(LockstepWorld(2), [comm.AllReduce(t, "sum") for t in launched])
    assert all(t.isnan().all() for t in launched) and all(reply.tolist() == [2.0] * 3 for reply in sums)


def test_a_sent_tensor_becomes_nan() -> None:
    exchange = [comm.Exchange({1: (sent := torch.ones(2))}, {}), comm.Exchange({}, {0: torch.empty(2)})]
    assert converse(LockstepWorld(2), exchange)[1][0].tolist() == [1.0, 1.0] and sent.isnan().all()


def test_the_reply_of_a_rank_is_memory_of_its_own() -> None:
    world = LockstepWorld(2)
    sums = converse(world, [comm.AllReduce(torch.ones(3), "sum") for _ in range(2)])
    others = converse(world, [comm.AllGather(torch.ones(3)) for _ in range(2)])
    sums[0].zero_()
    others[0][1].zero_()
    assert sums[1].tolist() == [2.0] * 3 and others[1][1].tolist() == [1.0] * 3


def test_the_splits_of_an_all_to_all_may_be_uneven() -> None:
    splits = [(2, 0, 1), (1, 1, 1), (0, 3, 0)]
    own = [torch.arange(3.0) + 10 * rank for rank in range(3)]
    received = list(zip(*splits, strict=True))
    requests = [comm.AllToAll(t, s, receives=r) for t, s, r in zip(own, splits, received, strict=True)]
    pieces = converse(LockstepWorld(3), requests)
    expected = [[[0, 1], [10], []], [[], [11], [20, 21, 22]], [[2], [12], []]]
    assert [[piece.tolist() for piece in reply] for reply in pieces] == expected


def test_an_exchange_receives_from_a_neighbour() -> None:
    exchanges = []
    for rank in range(5):
        to, peer = (rank + 1) % 5, (rank - 1) % 5
        exchanges.append(comm.Exchange({to: torch.full((rank + 1,), float(rank))}, {peer: torch.empty(peer + 1)}))
    for rank, reply in enumerate(converse(LockstepWorld(5), exchanges)):
        peer = (rank - 1) % 5
        assert list(reply) == [peer] and reply[peer].tolist() == [float(peer)] * (peer + 1)


@pytest.mark.parametrize(
    ("sent", "into", "words"),
    [
        (1, {}, "rank 0's sends and rank 1's receives"),
        (3, {0: torch.empty(2)}, r"rank 0 sends \(3,\) torch.float32 to rank 1, which expects \(2,\)"),
    ],
    ids=["not received", "of another size"],
)
def test_an_exchange_whose_ends_differ_names_them(sent: int, into: Any, words: str) -> None:
    with pytest.raises(LockstepError, match=words):
        converse(LockstepWorld(2), [comm.Exchange({1: torch.ones(sent)}, {}), comm.Exchange({}, into)])


def test_work_counts_as_decoding_only_after_the_last_reply() -> None:
    """After rounds before the payload, such as a clipping norm's, the message is still being computed."""
    worked: list[float] = []

    def work(seconds: float) -> None:
        start = time.perf_counter()
        time.sleep(seconds)
        worked.append(time.perf_counter() - start)

    def slow() -> Any:
        work(0.02)
        yield (comm.AllReduce(torch.ones(1)),)
        work(0.04)
        yield (comm.AllReduce(torch.ones(1)),)
        work(0.01)

    world, start = LockstepWorld(1), time.perf_counter()
    world.converse("slow", [slow()])
    seconds, passed = world.meters[0].seconds, time.perf_counter() - start
    assert seconds["compress"] >= worked[0] + worked[1] and seconds["decode"] >= worked[2]
    assert seconds["compress"] + seconds["decode"] <= passed


def test_ranks_know_their_place_in_the_groups_of_machines() -> None:
    transports = LockstepWorld(6, local_size=3).transports
    assert [(t.local_rank, t.local_size) for t in transports] == [(0, 3), (1, 3), (2, 3)] * 2
    assert [transports[rank].members("local") for rank in (0, 2, 4)] == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
    assert [transports[rank].members("cross") for rank in (0, 2, 4)] == [[0, 3], [2, 5], [1, 4]]
    assert [t.group_rank("local") for t in transports] == [0, 1, 2, 0, 1, 2]
    assert [t.group_rank("cross") for t in transports] == [0, 0, 0, 1, 1, 1]
    assert [t.group_rank("world") for t in transports] == list(range(6))
    groups: tuple[Group, ...] = ("world", "local", "cross")
    assert [transports[0].group_size(group) for group in groups] == [6, 3, 2]


@pytest.mark.parametrize(
    ("group", "totals"), [("world", [15] * 6), ("local", [3, 3, 3, 12, 12, 12]), ("cross", [3, 5, 7] * 2)]
)
def test_a_sum_is_over_the_ranks_of_its_group(group: Group, totals: list[int]) -> None:
    world = LockstepWorld(6, local_size=3)
    sums = converse(world, [comm.AllReduce(torch.tensor([rank]), "sum", group) for rank in range(6)])
    assert [reply.item() for reply in sums] == totals


def test_machines_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="local_size must divide the number of ranks, 5, but it is 2"):
        LockstepWorld(5, local_size=2)


def in_groups(request: Any, *options: Any) -> Any:
    """The replies of 2 machines of 2 ranks."""
    own = [torch.tensor([float(rank), 10.0 + rank]) for rank in range(4)]
    return converse(LockstepWorld(4, local_size=2), [request(t, *options) for t in own])


def test_an_all_gather_is_within_its_group() -> None:
    gathered = in_groups(comm.AllGather, "cross")
    assert [[piece[0].item() for piece in reply] for reply in gathered] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_a_reduce_scatter_is_within_its_group() -> None:
    scattered = in_groups(comm.ReduceScatter, "sum", "local")
    assert [reply.tolist() for reply in scattered] == [[1.0], [21.0], [5.0], [25.0]]


def test_the_root_of_a_broadcast_is_a_rank_of_its_group() -> None:
    assert [reply[0].item() for reply in in_groups(comm.Broadcast, 1, "local")] == [1.0, 1.0, 3.0, 3.0]


def test_an_all_to_all_is_within_its_group() -> None:
    swapped = in_groups(comm.AllToAll, (1, 1), "cross")
    assert [[p.item() for p in reply] for reply in swapped] == [[0, 2], [1, 3], [10, 12], [11, 13]]


def test_the_peers_of_an_exchange_are_ranks_of_its_group() -> None:
    mates = [1 - rank % 2 for rank in range(4)]
    own = [torch.tensor([float(rank)]) for rank in range(4)]
    pairs = [comm.Exchange({m: t}, {m: torch.empty(1)}, "local") for m, t in zip(mates, own, strict=True)]
    received = converse(LockstepWorld(4, local_size=2), pairs)
    assert [next(iter(reply.values())).item() for reply in received] == [1.0, 0.0, 3.0, 2.0]


@pytest.mark.parametrize("culprit", [1, 2])
@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        (comm.AllReduce(ONE), comm.AllGather(ONE)),
        (comm.AllReduce(ONE), comm.AllReduce(ONE, "sum")),
        (comm.AllReduce(ONE), comm.AllReduce(torch.ones(3))),
        (comm.AllReduce(ONE), comm.AllReduce(torch.ones(1, 2))),
        (comm.AllReduce(ONE), comm.AllReduce(ONE.double())),
        (comm.AllReduce(ONE), comm.AllReduce(ONE, group="local")),
        (comm.AllGather(ONE), comm.AllGather(torch.ones(3))),
        (comm.Broadcast(ONE), comm.Broadcast(ONE, 1)),
        (comm.ReduceScatter(torch.ones(3)), comm.ReduceScatter(torch.ones(6))),
        (comm.AllToAll(torch.ones(3), (1, 1, 1)), comm.AllToAll(torch.ones(3).double(), (1, 1, 1))),
    ],
    ids="kind operation size shape dtype group gathered-size root scattered-size split-dtype".split(),
)
def test_a_request_unlike_the_others_names_its_rank(usual: Request, odd: Request, culprit: int) -> None:
    requests = [odd if rank == culprit else usual for rank in range(3)]
    with pytest.raises(LockstepError, match=f"rank {culprit} sent"):
        converse(LockstepWorld(3), requests)


def rounds(*requests: int) -> Any:
    for number in requests:
        yield tuple(comm.AllReduce(ONE.clone()) for _ in range(number))


def test_another_number_of_requests_in_a_round_names_the_ranks() -> None:
    with pytest.raises(LockstepError, match="'world' rank 1 sent {0: [^}]*}, rank 0 sent {0: .*, 1: "):
        LockstepWorld(2).converse("test", [rounds(2), rounds(1)])


def test_another_number_of_rounds_names_the_rank_that_ended() -> None:
    with pytest.raises(LockstepError, match=r"ranks \[0\] ended"):
        LockstepWorld(3).converse("test", [rounds(1), rounds(1, 1), rounds(1, 1)])


def test_ranks_start_in_any_order_with_the_same_sums() -> None:
    orders, sums = set(), set()

    def body(rank: Any, started: Any) -> Any:
        started.append(rank)
        (first,) = yield (comm.AllReduce(torch.tensor([0.1 * rank]), "sum"),)
        (second,) = yield (comm.AllReduce(first * rank, "sum"),)
        return second.item()

    for seed in range(12):
        started: list[int] = []
        sums.update(LockstepWorld(4, seed=seed).converse("test", [body(rank, started) for rank in range(4)]))
        orders.add(tuple(started))
    assert len(orders) > 3 and len(sums) == 1


def launch_in_another_order_on_rank_0(transport: Any) -> list[float]:
    works = {n: total(transport, n, ord(n)) for n in ("abc" if transport.rank else "cab")}
    return [wait(transport, works[n]) for n in "abc"]


def test_ranks_may_launch_in_different_orders() -> None:
    world = LockstepWorld(2, strict=False)
    assert world.run(launch_in_another_order_on_rank_0) == [[194.0, 196.0, 198.0]] * 2


def test_a_strict_world_refuses_different_orders_of_launches() -> None:
    words = "rank 1 launches a as number 0 of communicator '', where another rank has"
    with pytest.raises(LockstepError, match=words):
        LockstepWorld(2).run(launch_in_another_order_on_rank_0)


def test_each_communicator_has_an_order_of_its_own() -> None:
    def body(transport: Any) -> Any:
        transport.open_communicator("other")
        lanes = ["", "other"] if transport.rank else ["other", ""]
        works = [total(transport, f"x{lane}", 1, lane) for lane in lanes]
        again = [total(transport, "a", i) for i in range(3)]  # reused before the others launch
        return [wait(transport, work) for work in (*works, *again)]

    assert LockstepWorld(2).run(body) == [[2.0, 2.0, 0.0, 2.0, 4.0]] * 2


def test_a_communicator_must_be_opened() -> None:
    with pytest.raises(LockstepError, match="a: rank 0 has not opened the communicator 'other'"):
        total(alone(), "a", 1, "other")


def test_ranks_take_turns_always_in_the_same_order() -> None:
    """Objects of all ranks, such as NumPy's random generator, therefore give the same numbers in every run."""

    def turns() -> Any:
        running, order = [], []

        def body(transport: Any) -> None:
            for step in range(3):
                running.append(transport.rank)
                time.sleep(0.001)
                order.append((step, transport.rank))
                assert running == [transport.rank], "another rank ran meanwhile"
                running.clear()
                wait(transport, total(transport, "x", 0))

        LockstepWorld(3).run(body)
        return order

    order = turns()
    assert order == turns()
    assert sorted(order) == [(step, rank) for step in range(3) for rank in range(3)]


def test_ranks_draw_random_numbers_of_their_own() -> None:
    def draw(rank: int, exchange: Any) -> Tensor:
        torch.manual_seed(rank)
        return torch.stack([(torch.rand(2), exchange(step))[0] for step in range(3)])

    def drawing(transport: Any) -> Tensor:
        def exchange(step: int) -> None:
            work = total(transport, f"step{step}", 1)
            while step != 1 and not transport.poll(work):
                pass
            transport.wait(work)

        return draw(transport.rank, exchange)

    for rank, drawn in enumerate(LockstepWorld(3).run(drawing)):
        assert torch.equal(drawn, draw(rank, lambda step: None))


def test_ranks_may_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that goes on finds the device idle, and its generator as it was."""
    states, events = {"gpu": -1}, []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("idle"))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: states["gpu"])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: states.update(gpu=state))

    def body(transport: Any) -> None:
        threads = []
        for step in range(3):
            events.append(transport.rank)
            states["gpu"] = 10 * step + transport.rank
            wait(transport, total(transport, f"step{step}", 0))
            assert states["gpu"] == 10 * step + transport.rank
            x = torch.ones(1, requires_grad=True)
            x.register_hook(lambda gradient: threads.append(threading.current_thread()))
            x.sum().backward()
        assert not torch._C._is_multithreading_enabled() and set(threads) == {threading.current_thread()}

    LockstepWorld(2).run(body)
    assert torch._C._is_multithreading_enabled()
    switches = [(a, b) for a, b in pairwise(events) if "idle" not in (a, b)]
    assert events.count("idle") >= 4 and all(a == b for a, b in switches)


def test_poll_returns_whether_all_ranks_have_launched() -> None:
    one, other = LockstepWorld(2).transports
    first = total(one, "a", 1)
    assert not one.poll(first)
    second = total(other, "a", 1)
    assert one.poll(first) and other.poll(second)


def test_a_rank_that_waits_for_others_outside_of_run_raises() -> None:
    transport = LockstepWorld(3).transports[1]
    with pytest.raises(LockstepError, match=r"a: rank 1 waits for ranks \[0, 2\]"):
        wait(transport, total(transport, "a", 1))


@pytest.mark.parametrize(
    ("early", "words"), [(2, "[2]"), (-1, "waits for ranks")], ids=["a rank returns", "other names"]
)
def test_ranks_that_wait_in_vain_raise(early: int, words: str) -> None:
    """In a thread, which may hang."""

    def body(transport: Any) -> None:
        if transport.rank != early:
            wait(transport, total(transport, "a" if early >= 0 else f"step{transport.rank}", 1))

    caught: list[str] = []

    def work() -> None:
        try:
            LockstepWorld(3, strict=early > 0).run(body)
        except LockstepError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(patient(10))
    assert len(caught) == 1 and words in caught[0]


def fail_on_rank_1(transport: Any, seen: list[str]) -> float:
    if transport.rank == 1:
        raise KeyError("mine")
    try:
        return wait(transport, total(transport, "a", 100))
    except LockstepError as error:
        seen.append(str(error))
        raise


@pytest.mark.timeout(20)
def test_a_failing_rank_ends_all_ranks_with_its_error() -> None:
    seen: list[str] = []
    with pytest.raises(KeyError, match="mine"):
        LockstepWorld(3).run(lambda transport: fail_on_rank_1(transport, seen))
    assert len(seen) == 2 and all("1" in message for message in seen)


@pytest.mark.timeout(20)
def test_a_world_drops_the_requests_of_ranks_that_failed() -> None:
    world = LockstepWorld(3)
    with pytest.raises(KeyError, match="mine"):
        world.run(lambda transport: fail_on_rank_1(transport, []))
    assert world.run(lambda transport: wait(transport, total(transport, "a", 1))) == [3.0] * 3


def test_a_conversation_advances_by_rounds_without_waiting() -> None:
    world, meters = LockstepWorld(2), [comm.TrafficMeter(), comm.TrafficMeter()]

    def body(value: Any) -> Any:
        (a,) = yield (comm.AllReduce(torch.tensor([value]), "sum"),)
        (b,) = yield (comm.AllReduce(a * 2, "sum"),)
        return b.item()

    first = comm.RunningConversation("t", body(1.0), world.transports[0], meters[0])
    assert first.rounds == 1 and not first.advance() and first.rounds == 1
    second = comm.RunningConversation("t", body(2.0), world.transports[1], meters[1])
    assert not first.advance() and first.rounds == 2
    assert second.advance() and second.finish() == 12.0
    assert first.advance() and first.finish() == 12.0
    assert meters[0].rounds == meters[1].rounds == 2
    assert set(meters[0].seconds) == {"compress", "launch", "wait", "decode", "step"}


def of_rounds(number: int, transport: Any) -> Any:
    def body() -> Any:
        for _ in range(number):
            yield (comm.AllReduce(torch.ones(1)),)
        return 7

    return comm.RunningConversation("bucket", body(), transport, comm.TrafficMeter())


def test_each_round_of_a_conversation_has_a_name() -> None:
    transport = noting()
    assert of_rounds(2, transport).finish() == 7 and transport.launched == ["bucket.0", "bucket.1"]


def test_a_conversation_without_rounds_has_ended() -> None:
    ended = of_rounds(0, transport := noting())
    assert ended.done and ended.advance() and ended.finish() == 7
    assert ended.rounds == 0 and transport.launched == []


def two_groups(rank: int, aligned: bool) -> Any:
    local, cross = comm.AllReduce(torch.ones(1), "sum", "local"), torch.full((1,), rank)
    mine = (comm.AllGather(cross, "cross"),) if rank % 2 else ()
    replies = yield (local, *mine) if aligned else (*mine, local)
    return [[int(element) for element in reply] for reply in replies]


def test_a_round_may_have_requests_of_groups_that_differ_between_ranks() -> None:
    expected = [[[2]], [[2], [1, 3]], [[2]], [[2], [1, 3]]]
    assert LockstepWorld(4, 2).converse("test", [two_groups(rank, True) for rank in range(4)]) == expected


def test_requests_of_a_group_at_different_places_of_a_round_are_refused() -> None:
    with pytest.raises(LockstepError, match=r"'local' rank 1 sent {1: .*}, rank 0 sent {0: "):
        LockstepWorld(4, 2).converse("test", [two_groups(rank, False) for rank in range(4)])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_reduce_leaves_tensors_as_they_are(size: int) -> None:
    ops: Any = ("mean", "sum", "min", "max")

    def body(transport: Any) -> Any:
        own = torch.tensor([float(transport.rank)])
        return [all_reduce(transport, own, op).item() for op in ops], own.item()

    expected = [(size - 1) / 2, size * (size - 1) / 2, 0.0, size - 1.0]
    assert LockstepWorld(size).run(body) == [(expected, float(rank)) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_reduce_adds_integers_of_any_shape(size: int) -> None:
    def body(transport: Any) -> Any:
        counts = all_reduce(transport, torch.full((2, 3), transport.rank + 1), "sum", "counts")
        return counts.dtype, counts.tolist()

    assert LockstepWorld(size).run(body) == [(torch.int64, [[sum(range(size + 1))] * 3] * 2)] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_barrier_waits_for_all_ranks(size: int) -> None:
    arrived: list[int] = []

    def body(transport: Any) -> int:
        arrived.append(transport.rank)
        barrier(transport)
        return len(arrived)

    assert LockstepWorld(size).run(body) == [size] * size


def object_of(rank: int) -> Any:
    return {"rank": rank, "data": "x" * 1000 * rank} if rank else None


def broadcast_from(root: int, transport: Any) -> Any:
    return broadcast_object(transport, object_of(transport.rank), root)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gathered_objects_may_have_different_sizes(size: int) -> None:
    found = LockstepWorld(size).run(lambda transport: all_gather_object(transport, object_of(transport.rank)))
    assert found == [[*map(object_of, range(size))]] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_object_of_any_rank_can_be_broadcast(size: int) -> None:
    for root in (0, size - 1):
        found = LockstepWorld(size).run(partial(broadcast_from, root))
        assert found == [object_of(root)] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_broadcast_object_may_be_a_tensor(size: int) -> None:
    found = LockstepWorld(size).run(lambda t: broadcast_object(t, torch.arange(3) * (t.rank == 0)).tolist())
    assert found == [[0, 1, 2]] * size


@pytest.mark.parametrize(
    "request_of",
    [comm.AllGather, lambda tensor: comm.AllToAll(tensor, (1, 1)), comm.ReduceScatter],
    ids=["AllGather", "AllToAll", "ReduceScatter"],
)
def test_a_tensor_of_two_dimensions_is_refused_as_the_network_does(request_of: Any) -> None:
    with pytest.raises(LockstepError, match="takes a one-dimensional tensor, not one of shape"):
        converse(LockstepWorld(2), [request_of(torch.ones(2, 2)) for _ in range(2)])
