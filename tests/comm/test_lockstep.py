"""The lockstep transport: expected replies, groups, requests that do not match, threads that fail or end early."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from dgc.comm import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    ReduceScatter,
    RunningConversation,
    TrafficMeter,
)
from dgc.comm.lockstep import LockstepError, LockstepTransport, LockstepWorld
from dgc.comm.requests import Group, Request


def ask(request: Request) -> Any:
    """A conversation of one round with one request."""
    (reply,) = yield (request,)
    return reply


def converse(world: Any, requests: Any) -> Any:
    return world.converse("test", [ask(request) for request in requests])


def tensors(size: Any, n: int = 6, dtype: Any = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(n, generator=generator).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sum", lambda t: t.sum(0)),
        ("mean", lambda t: t.mean(0)),
        ("min", lambda t: t.amin(0)),
        ("max", lambda t: t.amax(0)),
    ],
)
def test_all_reduce_gives_every_rank_the_same_bits(size: Any, op: Any, expected: Any) -> None:
    own = tensors(size)
    stacked = torch.stack(own)
    replies = converse(LockstepWorld(size), [AllReduce(t.clone(), op) for t in own])
    torch.testing.assert_close(replies[0], expected(stacked))
    assert all(torch.equal(reply, replies[0]) for reply in replies)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_gather_is_ordered_by_rank(size: Any) -> None:
    own = tensors(size)
    for reply in converse(LockstepWorld(size), [AllGather(t.clone()) for t in own]):
        assert isinstance(reply, tuple) and len(reply) == size
        assert all(torch.equal(got, sent) for got, sent in zip(reply, own, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_reduce_scatter_gives_each_rank_its_share(size: Any) -> None:
    own = tensors(size, 4 * size)
    replies = converse(LockstepWorld(size), [ReduceScatter(t.clone(), "sum") for t in own])
    torch.testing.assert_close(torch.cat(replies), torch.stack(own).sum(0))
    assert all(reply.numel() == 4 for reply in replies)


def test_reduce_scatter_refuses_a_length_that_the_size_does_not_divide() -> None:
    with pytest.raises(LockstepError):
        converse(LockstepWorld(2), [ReduceScatter(torch.ones(5)) for _ in range(2)])


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_gives_the_roots_tensor(root: Any) -> None:
    own = tensors(3)
    for reply in converse(LockstepWorld(3), [Broadcast(t.clone(), root) for t in own]):
        assert torch.equal(reply, own[root])


def test_all_to_all_with_uneven_splits() -> None:
    splits = [(2, 0, 1), (1, 1, 1), (0, 3, 0)]
    own = [torch.arange(3.0) + 10 * rank for rank in range(3)]
    received = list(zip(*splits, strict=True))
    requests = [AllToAll(t, s, receives=r) for t, s, r in zip(own, splits, received, strict=True)]
    replies = converse(LockstepWorld(3), requests)
    expected = [
        [[0.0, 1.0], [10.0], []],
        [[], [11.0], [20.0, 21.0, 22.0]],
        [[2.0], [12.0], []],
    ]
    assert [[piece.tolist() for piece in reply] for reply in replies] == expected


def test_exchange_delivers_to_neighbours_on_a_ring() -> None:
    size = 5
    requests = [
        Exchange({(rank + 1) % size: torch.full((rank + 1,), float(rank))}, {s: torch.empty(s + 1)})
        for rank in range(size)
        for s in [(rank - 1) % size]
    ]
    for rank, reply in enumerate(converse(LockstepWorld(size), requests)):
        source = (rank - 1) % size
        assert list(reply) == [source] and reply[source].tolist() == [float(source)] * (source + 1)


def test_exchange_with_a_send_that_no_rank_receives() -> None:
    requests = [Exchange({1: torch.ones(1)}, {}), Exchange({}, {})]
    with pytest.raises(LockstepError, match="rank 0's sends and rank 1's receives"):
        converse(LockstepWorld(2), requests)


def test_exchange_of_another_length_than_expected() -> None:
    requests = [Exchange({1: torch.ones(3)}, {}), Exchange({}, {0: torch.empty(2)})]
    with pytest.raises(LockstepError, match=r"rank 0 sends \(3,\) torch.float32 to rank 1, which expects \(2,\)"):
        converse(LockstepWorld(2), requests)


def test_replies_are_not_shared_between_ranks() -> None:
    replies = converse(LockstepWorld(2), [AllReduce(torch.ones(3)) for _ in range(2)])
    replies[0].zero_()
    assert replies[1].tolist() == [1.0, 1.0, 1.0]
    gathered = converse(LockstepWorld(2), [AllGather(torch.ones(3)) for _ in range(2)])
    gathered[0][1].zero_()
    assert gathered[1][1].tolist() == [1.0, 1.0, 1.0]


def test_work_counts_as_decoding_only_after_the_last_reply() -> None:
    """After rounds before the payload, such as that of a clipping norm, the message is still being computed."""

    worked: list[float] = []

    def work(seconds: float) -> None:
        start = time.perf_counter()
        time.sleep(seconds)
        worked.append(time.perf_counter() - start)

    def slow() -> Any:
        work(0.02)
        yield (AllReduce(torch.ones(1)),)
        work(0.04)
        yield (AllReduce(torch.ones(1)),)
        work(0.01)

    world, start = LockstepWorld(1), time.perf_counter()
    world.converse("slow", [slow()])
    seconds, passed = world.meters[0].seconds, time.perf_counter() - start
    assert seconds["compress"] >= worked[0] + worked[1] and seconds["decode"] >= worked[2]
    assert seconds["compress"] + seconds["decode"] <= passed


def test_launched_tensors_are_invalidated() -> None:
    """A launched tensor belongs to the transport: Horovod writes the reply into it. Here it becomes NaN."""
    own = [torch.ones(3) for _ in range(2)]
    replies = converse(LockstepWorld(2), [AllReduce(t, "sum") for t in own])
    assert all(t.isnan().all() for t in own) and all(reply.tolist() == [2.0] * 3 for reply in replies)
    sent = torch.ones(2)
    exchange = [Exchange({1: sent}, {}), Exchange({}, {0: torch.empty(2)})]
    assert converse(LockstepWorld(2), exchange)[1][0].tolist() == [1.0, 1.0] and sent.isnan().all()


# --- groups --------------------------------------------------------------------------------------


def test_groups_of_two_machines_of_three() -> None:
    world = LockstepWorld(6, local_size=3)
    assert [t.local_rank for t in world.transports] == [0, 1, 2, 0, 1, 2]
    assert [t.local_size for t in world.transports] == [3] * 6
    assert [world.transports[rank].members("local") for rank in (0, 2, 4)] == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
    assert [world.transports[rank].members("cross") for rank in (0, 2, 4)] == [[0, 3], [2, 5], [1, 4]]
    assert [t.group_rank("local") for t in world.transports] == [0, 1, 2, 0, 1, 2]
    assert [t.group_rank("cross") for t in world.transports] == [0, 0, 0, 1, 1, 1]
    assert [t.group_rank("world") for t in world.transports] == list(range(6))
    groups: tuple[Group, ...] = ("world", "local", "cross")
    sizes = [world.transports[0].group_size(group) for group in groups]
    assert sizes == [6, 3, 2]


@pytest.mark.parametrize(
    ("group", "expected"),
    [("world", [15.0] * 6), ("local", [3.0, 3.0, 3.0, 12.0, 12.0, 12.0]), ("cross", [3.0, 5.0, 7.0] * 2)],
)
def test_all_reduce_within_a_group(group: Any, expected: Any) -> None:
    requests = [AllReduce(torch.tensor([float(rank)]), "sum", group) for rank in range(6)]
    replies = converse(LockstepWorld(6, local_size=3), requests)
    assert [reply.item() for reply in replies] == expected


def test_other_requests_within_a_group() -> None:
    world = LockstepWorld(4, local_size=2)
    own = [torch.tensor([float(rank), 10.0 + rank]) for rank in range(4)]
    gathered = converse(world, [AllGather(t.clone(), "cross") for t in own])
    assert [[piece[0].item() for piece in reply] for reply in gathered] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    scattered = converse(world, [ReduceScatter(t.clone(), "sum", "local") for t in own])
    assert [reply.tolist() for reply in scattered] == [[1.0], [21.0], [5.0], [25.0]]
    sent = converse(world, [Broadcast(t.clone(), 1, "local") for t in own])
    assert [reply[0].item() for reply in sent] == [1.0, 1.0, 3.0, 3.0]
    swapped = converse(world, [AllToAll(t.clone(), (1, 1), "cross") for t in own])
    assert [[p.item() for p in reply] for reply in swapped] == [[0, 2], [1, 3], [10, 12], [11, 13]]
    pairs = [Exchange({1 - rank % 2: t}, {1 - rank % 2: torch.empty(2)}, "local") for rank, t in enumerate(own)]
    assert [next(iter(r.values()))[0].item() for r in converse(world, pairs)] == [1.0, 0.0, 3.0, 2.0]


def test_local_size_must_divide_the_size() -> None:
    with pytest.raises(ValueError, match="local_size must divide the number of ranks, 5, but it is 2"):
        LockstepWorld(5, local_size=2)


# --- disagreements ---------------------------------------------------------------------------------

ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        (AllReduce(ONE), AllGather(ONE)),
        (AllReduce(ONE), AllReduce(ONE, "sum")),
        (AllReduce(ONE), AllReduce(torch.ones(3))),
        (AllReduce(ONE), AllReduce(torch.ones(1, 2))),
        (AllReduce(ONE), AllReduce(ONE.double())),
        (AllReduce(ONE), AllReduce(ONE, group="local")),
        (AllGather(ONE), AllGather(torch.ones(3))),
        (Broadcast(ONE), Broadcast(ONE, 1)),
        (ReduceScatter(torch.ones(3)), ReduceScatter(torch.ones(6))),
        (AllToAll(torch.ones(3), (1, 1, 1)), AllToAll(torch.ones(3).double(), (1, 1, 1))),
    ],
)
@pytest.mark.parametrize("culprit", [1, 2])
def test_requests_that_do_not_match_name_the_rank(usual: Any, odd: Any, culprit: Any) -> None:
    requests = [odd if rank == culprit else usual for rank in range(3)]
    with pytest.raises(LockstepError, match=f"rank {culprit} sent"):
        converse(LockstepWorld(3), requests)


def test_different_numbers_of_requests() -> None:
    def two() -> Any:
        return (yield (AllReduce(ONE), AllReduce(ONE)))

    with pytest.raises(LockstepError, match="'world' rank 1 sent {0: [^}]*}, rank 0 sent {0: .*, 1: "):
        LockstepWorld(2).converse("test", [two(), ask(AllReduce(ONE))])


def test_different_numbers_of_rounds() -> None:
    def rounds(count: Any) -> Any:
        for _ in range(count):
            yield (AllReduce(ONE.clone()),)

    with pytest.raises(LockstepError, match=r"ranks \[0\] ended"):
        LockstepWorld(3).converse("test", [rounds(1), rounds(2), rounds(2)])


def test_launch_order_is_shuffled_and_does_not_matter() -> None:
    orders, sums = set(), set()
    for seed in range(12):
        world = LockstepWorld(4, seed=seed)
        started: list[int] = []

        def body(rank: Any, started: Any = started) -> Any:
            started.append(rank)
            (first,) = yield (AllReduce(torch.tensor([0.1 * rank]), "sum"),)
            (second,) = yield (AllReduce(first * rank, "sum"),)
            return second.item()

        results = world.converse("test", [body(rank) for rank in range(4)])
        orders.add(tuple(started))
        sums.update(results)
    assert len(orders) > 3
    assert len(sums) == 1


def test_several_requests_in_one_round_keep_their_order() -> None:
    def body(rank: Any) -> Any:
        return (yield (AllReduce(torch.tensor([1.0 * rank]), "sum"), AllGather(torch.tensor([rank]))))

    for total, gathered in LockstepWorld(3).converse("test", [body(rank) for rank in range(3)]):
        assert total.item() == 3.0
        assert [t.item() for t in gathered] == [0, 1, 2]


# --- threads ---------------------------------------------------------------------------------------


def test_run_returns_results_by_rank() -> None:
    def body(transport: Any) -> Any:
        work = transport.launch("a", (AllReduce(torch.tensor([float(transport.rank)]), "max"),))
        return transport.rank, transport.wait(work)[0].item()

    assert LockstepWorld(3).run(body) == [(0, 2.0), (1, 2.0), (2, 2.0)]


def test_requests_are_matched_by_name_in_any_launch_order() -> None:
    def body(transport: Any) -> Any:
        names = ["a", "b", "c"] if transport.rank else ["c", "a", "b"]
        works = {n: transport.launch(n, (AllReduce(torch.tensor([float(ord(n))]), "sum"),)) for n in names}
        return [transport.wait(works[n])[0].item() for n in "abc"]

    assert LockstepWorld(2, strict=False).run(body) == [[194.0, 196.0, 198.0]] * 2


def test_a_name_that_is_reused_before_the_others_launch() -> None:
    def body(transport: Any) -> Any:
        works = [transport.launch("a", (AllReduce(torch.tensor([float(i)]), "sum"),)) for i in range(3)]
        return [transport.wait(work)[0].item() for work in works]

    assert LockstepWorld(3).run(body) == [[0.0, 3.0, 6.0]] * 3


def test_ranks_take_turns_always_in_the_same_order() -> None:
    """Shared objects, such as NumPy's random generator, therefore give the same numbers in every run."""

    def turns() -> Any:
        running, order = [], []

        def body(transport: Any) -> None:
            for step in range(3):
                running.append(transport.rank)
                time.sleep(0.001)
                order.append((step, transport.rank))
                assert running == [transport.rank], "another rank ran meanwhile"
                running.clear()
                transport.wait(transport.launch("x", (AllReduce(torch.zeros(1)),)))

        LockstepWorld(3).run(body)
        return order

    order = turns()
    assert order == turns()
    assert sorted(order) == [(step, rank) for step in range(3) for rank in range(3)]


def test_a_rank_draws_the_numbers_of_a_process_of_its_own() -> None:
    def draw(rank: int, exchange: Any) -> list[Tensor]:
        torch.manual_seed(rank)
        drawn = []
        for step in range(3):
            drawn.append(torch.rand(2))
            exchange(step)
        return drawn

    def body(transport: Any) -> list[Tensor]:
        def exchange(step: int) -> None:
            work = transport.launch(f"step{step}", [AllReduce(torch.ones(1), "sum")])
            if step != 1:
                while not transport.poll(work):
                    pass
            transport.wait(work)

        return draw(transport.rank, exchange)

    for rank, drawn in enumerate(LockstepWorld(3).run(body)):
        assert torch.equal(torch.stack(drawn), torch.stack(draw(rank, lambda step: None)))


def test_poll_returns_whether_all_ranks_have_launched() -> None:
    world = LockstepWorld(2)
    first = world.transports[0].launch("a", (AllReduce(ONE.clone()),))
    assert not world.transports[0].poll(first)
    second = world.transports[1].launch("a", (AllReduce(ONE.clone()),))
    assert world.transports[0].poll(first) and world.transports[1].poll(second)


def test_waiting_alone_outside_of_run_raises_at_once() -> None:
    transport = LockstepWorld(3).transports[1]
    work = transport.launch("a", (AllReduce(ONE.clone()),))
    with pytest.raises(LockstepError, match=r"a: rank 1 waits for ranks \[0, 2\]"):
        transport.wait(work)


@pytest.mark.timeout(20)
def test_a_failing_rank_ends_all_ranks_with_its_error() -> None:
    seen = []

    def body(transport: Any) -> None:
        if transport.rank == 1:
            raise KeyError("mine")
        try:
            transport.wait(transport.launch("a", (AllReduce(ONE.clone()),)))
        except LockstepError as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError, match="mine"):
        LockstepWorld(3).run(body)
    assert len(seen) == 2 and all("1" in message for message in seen)


def test_a_world_can_be_used_after_a_failed_run() -> None:
    """Requests of the failed run are dropped."""
    world = LockstepWorld(2)

    def body(transport: Any, value: Any, fails: Any) -> Any:
        if transport.rank == 1 and fails:
            raise KeyError("mine")
        return transport.wait(transport.launch("a", (AllReduce(torch.tensor([value]), "sum"),)))[0].item()

    with pytest.raises(KeyError):
        world.run(lambda transport: body(transport, 100.0, True))
    assert world.run(lambda transport: body(transport, 1.0, False)) == [2.0, 2.0]


def in_time(call: Any, seconds: int = 10) -> Any:
    """Return the error of a call. It runs in a thread, so that a call that hangs does not block the test."""
    caught = []

    def work() -> None:
        try:
            call()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    return caught[0] if caught else None


def test_a_rank_that_returns_early_is_named() -> None:
    def body(transport: Any) -> None:
        if transport.rank != 2:
            transport.wait(transport.launch("a", (AllReduce(ONE.clone()),)))

    error = in_time(lambda: LockstepWorld(3).run(body))
    assert isinstance(error, LockstepError) and "[2]" in str(error)


def test_ranks_that_wait_for_each_other_under_different_names() -> None:
    def body(transport: Any) -> None:
        transport.wait(transport.launch(f"step{transport.rank}", (AllReduce(ONE.clone()),)))

    error = in_time(lambda: LockstepWorld(2, strict=False).run(body))
    assert isinstance(error, LockstepError) and "waits for ranks" in str(error)


# --- RunningConversation ---------------------------------------------------------------------------


def test_a_conversation_without_rounds_is_done_at_once() -> None:
    def body() -> Any:
        yield from ()
        return 7

    running = RunningConversation("t", body(), LockstepWorld(1).transports[0], TrafficMeter())
    assert running.done and running.advance() and running.finish() == 7 and running.rounds == 0


def test_a_conversation_advances_by_rounds_and_never_waits() -> None:
    world, meters = LockstepWorld(2), [TrafficMeter(), TrafficMeter()]

    def body(value: Any) -> Any:
        (a,) = yield (AllReduce(torch.tensor([value]), "sum"),)
        (b,) = yield (AllReduce(a * 2, "sum"),)
        return b.item()

    first = RunningConversation("t", body(1.0), world.transports[0], meters[0])
    assert first.rounds == 1 and not first.advance() and first.rounds == 1
    second = RunningConversation("t", body(2.0), world.transports[1], meters[1])
    assert not first.advance() and first.rounds == 2
    assert second.advance() and second.finish() == 12.0
    assert first.advance() and first.finish() == 12.0
    assert meters[0].rounds == meters[1].rounds == 2
    assert set(meters[0].seconds) == {"compress", "launch", "wait", "decode", "step"}


def test_a_conversation_names_its_rounds() -> None:
    names = []

    class Transport(LockstepTransport):
        def launch(self, name: Any, requests: Any, communicator: Any = "") -> Any:
            names.append(name)
            return super().launch(name, requests, communicator)

    def body() -> Any:
        yield (AllReduce(torch.ones(1)),)
        yield (AllReduce(torch.ones(1)),)

    RunningConversation("bucket", body(), Transport(LockstepWorld(1), 0), TrafficMeter()).finish()
    assert names == ["bucket.0", "bucket.1"]


def test_requests_of_a_group_have_equal_places_and_other_groups_may_send_others() -> None:
    def body(rank: int, aligned: bool) -> Any:
        local, cross = AllReduce(torch.ones(1), "sum", "local"), AllGather(torch.full((1,), rank), "cross")
        mine = (cross,) if rank % 2 else ()
        replies = yield (local, *mine) if aligned else (*mine, local)
        return [[int(element) for element in reply] for reply in replies]

    expected = [[[2]], [[2], [1, 3]], [[2]], [[2], [1, 3]]]
    assert LockstepWorld(4, 2).converse("test", [body(rank, True) for rank in range(4)]) == expected
    with pytest.raises(LockstepError, match=r"'local' rank 1 sent {1: .*}, rank 0 sent {0: "):
        LockstepWorld(4, 2).converse("test", [body(rank, False) for rank in range(4)])
