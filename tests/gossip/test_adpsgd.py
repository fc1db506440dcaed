"""AD-PSGD on simulated networks: sums are preserved, models converge, draining always ends, no message is lost."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count, product
from math import inf
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from channels import ChannelWorld
from environment import patient
from refusals import check_refusals, refuse

from dgc import gossip
from dgc.comm import TrafficMeter
from dgc.comm.lockstep import LockstepWorld
from dgc.gossip import Topology, TopologyError
from dgc.gossip.adpsgd import ADPSGD, AveragingProtocol, GossipError
from dgc.gossip.graphs import bipartite_complete
from dgc.gossip.model import FlatModel
from dgc.gossip.topology import bipartite_subgraph, peer_schedule
from dgc.optim import LocalOptimizer
from dgc.sparse.payloads import PayloadError


def line(size: Any) -> Any:
    """The graph with the largest diameter."""
    return Topology("line", size, 1, lambda r, _: (p for p in (r - 1, r + 1) if 0 <= p < size))


def tree(size: Any) -> Any:
    """Random, of odd-even pairs only."""
    order = random.Random(size)
    edges = [(r, order.choice([p for p in range(r) if (r - p) % 2])) for r in range(1, size)]
    return Topology("tree", size, 1, lambda r, _: [a + b - r for a, b in edges if r in (a, b)])


GRAPHS = {
    bipartite_complete: (2, 3, 4, 5, 8, 16),
    line: (2, 3, 8, 17),
    tree: (5, 8, 16),
    gossip.ring: (5, 8),
    gossip.grid: (9,),
    gossip.full: (5,),
    gossip.exponential: (8,),
}
CASES: list[Any] = [pytest.param(graph, n, id=f"{graph.__name__}-{n}") for graph, ns in GRAPHS.items() for n in ns]
pytestmark = pytest.mark.usefixtures("no_type_checks")


def total(xs: Any) -> Any:
    return sum(x.double() for x in xs)


@dataclass
class Simulation:
    """All ranks in one thread: a seeded order in which ranks poll the network. One poll takes 10 ms."""

    topology: Topology
    seed: int = 0
    averagings_per_step: float = inf
    timeout: float = 1e9
    numel: int = 3
    stopped: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        size = self.topology.size
        self.random = random.Random(self.seed)
        self.world = ChannelWorld(size, self.seed, max_delay=5 * size)
        generator = torch.Generator().manual_seed(self.seed)
        self.xs = list(torch.randn(size, self.numel, generator=generator, dtype=torch.float32))
        pairs = bipartite_subgraph(self.topology)
        ends, limits = zip(self.xs, self.world.channels, strict=True), (self.averagings_per_step, self.timeout)
        self.protocols = [AveragingProtocol(x, pairs, channel, *limits) for x, channel in ends]
        self.now, self.tag = 0.0, 0
        for rank in range(size):
            self.begin(rank)

    def begin(self, rank: Any) -> None:
        self.protocols[rank].begin()
        self.protocols[rank].open(self.tag, self.now)

    def look(self, rank: Any = None) -> None:
        rank = self.random.randrange(self.topology.size) if rank is None else rank
        self.now += 0.01
        if rank not in self.stopped and not self.protocols[rank].is_over:
            self.protocols[rank].poll(self.now)

    def run(self, looks: Any) -> None:
        for _ in range(looks):
            self.look()

    def train(self, looks: Any) -> None:
        """A step of every rank, and time for its averages."""
        for protocol in self.protocols:
            protocol.count_step()
        self.run(looks)

    def drain(self, looks: int = 0) -> None:
        """After so many looks each rank has no more steps."""
        self.run(looks)
        for rank in self.random.sample(range(self.topology.size), self.topology.size):
            self.protocols[rank].is_draining = True
            self.run(self.random.randrange(20 * self.topology.size))
        self.finish()

    def finish(self) -> None:
        for _ in range(3000):
            if all(protocol.is_over for protocol in self.protocols):
                break
            for rank in range(self.topology.size):
                self.look(rank)
        assert all(protocol.is_over for protocol in self.protocols)
        assert self.world.in_flight == self.world.pending_receives == 0

    def spread(self) -> Any:
        x = torch.stack(self.xs)
        return float((x - x.mean(0)).norm())


@pytest.mark.parametrize(("graph", "size"), CASES)
def test_models_come_together_with_the_same_sum_until_all_ranks_have_ended(graph: Any, size: Any) -> None:
    simulation = Simulation(graph(size), seed=size)
    before, spread = total(simulation.xs), simulation.spread()
    simulation.drain(40 * size)
    torch.testing.assert_close(total(simulation.xs), before, rtol=0, atol=2e-6 * size)
    assert simulation.spread() < 0.95 * spread
    active = sum(m.averagings for m in simulation.protocols if m.is_active)
    assert active == sum(m.averagings for m in simulation.protocols if not m.is_active) > 0


def test_messages_may_overtake_the_end_of_a_cycle() -> None:
    """The first rank that receives END begins the next cycle while others are still in the old one."""
    simulation = Simulation(bipartite_complete(5))
    before, cycle = total(simulation.xs), [0] * 5
    for _ in range(40_000):
        rank = simulation.random.randrange(5)
        if simulation.protocols[rank].is_over:
            cycle[rank] += 1
            simulation.tag = cycle[rank]
            simulation.begin(rank)
        elif simulation.random.random() < 0.02:
            simulation.protocols[rank].is_draining = True
        simulation.look(rank)
    assert min(cycle) > 20 and max(cycle) - min(cycle) <= 1
    assert simulation.spread() < 1e-5
    torch.testing.assert_close(total(simulation.xs), before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("slow", [None, 1])
@pytest.mark.parametrize(("graph", "size"), [c for c in CASES if c.values[1] < 16])
def test_all_ranks_are_informed_that_an_epoch_is_over(graph: Any, size: Any, slow: Any) -> None:
    """Each trains until its step counts are large enough, which is soon. At the end the counts are exact.
    A slow rank may be the only path between two fast ones. Each step adds one to the x of its rank.
    """
    simulation = Simulation(graph(size), seed=size, averagings_per_step=1.0)
    protocols, goal, looks, since = simulation.protocols, 12 * size, 0, None
    before = total(simulation.xs)
    while not all(protocol.is_draining for protocol in protocols):
        rank = simulation.random.randrange(size)
        if int(protocols[rank].step_counts.sum()) >= goal:
            protocols[rank].is_draining = True
            since = looks if since is None else since
        elif simulation.random.random() < (0.0002 if rank == slow else 0.02):
            simulation.xs[rank].add_(1)
            protocols[rank].count_step()
        simulation.look(rank)
        looks += 1
    simulation.finish()
    steps = sum(int(protocol.step_counts[rank]) for rank, protocol in enumerate(protocols))
    assert all(int(protocol.step_counts.sum()) == steps for protocol in protocols) and goal <= steps
    torch.testing.assert_close(total(simulation.xs), before + steps, rtol=1e-5, atol=0)
    assert since is not None and looks - since <= 60 * size**2


@pytest.mark.parametrize(("rate", "most"), [(1.0, 50), (0.5, 25), (2.0, 100)])
def test_averages_are_bounded_by_the_steps(rate: float, most: int) -> None:
    simulation = Simulation(bipartite_complete(4), averagings_per_step=rate)
    for _ in range(50):
        simulation.train(400)
    simulation.drain()
    for protocol in simulation.protocols:
        assert protocol.averagings == most if protocol.is_active else protocol.averagings <= 2 * most


def test_what_the_network_was_too_slow_for_is_not_caught_up_on() -> None:
    simulation = Simulation(bipartite_complete(2), averagings_per_step=1.0)
    for _ in range(10):
        simulation.protocols[1].count_step()
    simulation.drain(500)
    assert simulation.protocols[1].averagings == 1


def test_ranks_without_steps_do_not_average() -> None:
    idle = Simulation(bipartite_complete(5), averagings_per_step=1.0, timeout=10.0)
    idle.drain(10_000)
    assert all(protocol.averagings == 0 for protocol in idle.protocols)


def test_a_pause_of_all_ranks_is_no_lost_rank() -> None:
    stopped = Simulation(bipartite_complete(2), averagings_per_step=1.0, timeout=1.0)
    stopped.run(500)
    stopped.now += 10_000
    stopped.drain(500)


def test_messages_are_as_long_as_documented() -> None:
    simulation = Simulation(bipartite_complete(4), numel=101)
    simulation.drain(200)
    header = 8 * (6 + 4)
    for protocol, without_x in zip(simulation.protocols, (3, 3, 1, 3), strict=True):
        assert protocol.sent_bytes == protocol.averagings * (header + 8 * 51) + without_x * header


@pytest.mark.parametrize("size", [2, 5])
def test_a_lost_rank_is_reported_to_all_others(size: Any) -> None:
    for draining, lost in product((False, True), range(size)):
        simulation, errors = Simulation(bipartite_complete(size), seed=lost, timeout=10.0 * size), {}
        simulation.run(30 * size)
        simulation.stopped.add(lost)
        for protocol in simulation.protocols:
            protocol.is_draining = draining
        for _ in range(40_000 * size):
            rank = simulation.random.randrange(size)
            if rank in errors:
                simulation.protocols[rank].complete_sends()
                continue
            try:
                simulation.look(rank)
            except GossipError as error:
                errors[rank] = str(error)
            if len(errors) == size - 1:
                break
        assert set(errors) == set(range(size)) - {lost}
        assert all(f"rank {lost} " in text and "timed out" in text for text in errors.values())


def noisy(world: ChannelWorld, number: int, byte: int) -> Any:
    """`world.send`, which changes one bit of the `number`-th message of rank 1."""
    numbers = count()

    def send(source: int, to: int, message: torch.Tensor, tag: int) -> Any:
        if source == 1 and next(numbers) == number:
            message = message.clone()
            message.view(torch.uint8)[byte] ^= 4
        return ChannelWorld.send(world, source, to, message, tag)

    return send


@pytest.mark.parametrize("number", range(6))
def test_a_flipped_bit_is_noticed(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each message: in the header, the kind, the sender, the steps and x."""
    for byte in (0, 8, 21, 24, 33, 50, -1):
        simulation = Simulation(bipartite_complete(4), numel=101, averagings_per_step=1.0)
        monkeypatch.setattr(simulation.world, "send", noisy(simulation.world, number, byte))
        with pytest.raises(PayloadError, match="a message of AD-PSGD with a wrong checksum"):
            simulation.train(800)
            simulation.drain()


@pytest.mark.parametrize("size", range(1, 18))
def test_bipartite_complete_has_all_pairs_of_an_odd_with_an_even_rank(size: int) -> None:
    topology = bipartite_complete(size)
    assert topology.is_symmetric
    for rank in range(size):
        peers = peer_schedule(bipartite_subgraph(topology), rank)
        assert sorted(peers) == [p for p in range(size) if (p - rank) % 2], rank


def test_a_bipartite_subgraph_has_each_edge_in_both_directions() -> None:
    assert peer_schedule(bipartite_subgraph(gossip.ring(4)), 1) == (2, 0)
    assert set(peer_schedule(bipartite_subgraph(gossip.ring(5)), 3)) == {2, 4}


def test_the_bipartite_subgraph_of_a_bipartite_graph_is_the_graph() -> None:
    graph = gossip.bipartite_exponential(8)
    assert peer_schedule(bipartite_subgraph(graph), 1) == peer_schedule(graph, 1)


@pytest.mark.parametrize("graph", [gossip.star(4), gossip.hierarchical(8, 2)], ids=["star", "hierarchical"])
def test_a_graph_whose_bipartite_subgraph_does_not_connect_the_ranks_is_refused(graph: Topology) -> None:
    with pytest.raises(TopologyError, match=r"never reaches ranks \[.*bipartite_complete"):
        bipartite_subgraph(graph)


class AgreedTransport:
    """A rank's end of a world of channels, for an optimizer that has nothing else to ask the other ranks."""

    def __init__(self, channel: Any) -> None:
        self._alone, self.channel = LockstepWorld(1).transports[0], lambda: channel
        self.rank, self.size = channel.rank, channel.size

    def __getattr__(self, name: Any) -> Any:
        return getattr(self._alone, name)


def begin(own: Any, z: Any, channel: Any) -> None:
    own.start(FlatModel([("z", z)]), AgreedTransport(channel), TrafficMeter())
    own.resume()


def in_threads(size: Any, body: Any) -> Any:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(body, range(size)))


def together(size: Any, body: Any, **options: Any) -> Any:
    """Run body(rank, gossip, z) in one thread per rank. Returns the results and the world."""
    world = ChannelWorld(size)

    def on_rank(rank: Any) -> Any:
        own, z = ADPSGD(**options), torch.zeros(11)
        begin(own, z, world.channels[rank])
        try:
            return body(rank, own, z)
        finally:
            own.close()

    return in_threads(size, on_rank), world


def steps(own: Any, z: Any, number: Any) -> None:
    for _ in range(number):
        own.begin_step()
        own.update(lambda: z.add_(1))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_steps_of_all_threads_count_over_pauses(size: Any) -> None:
    def body(rank: Any, own: Any, z: Any) -> Any:
        for number in (1, 20, 0, 5):
            steps(own, z, number)
            own.synchronize_messages()
            own.resume()
        own.synchronize_messages()
        own.synchronize_messages()
        assert own.progress == own.state_dict()["steps"] == 26 * size
        assert size == 1 or own._meter.payload_bytes > 0
        return z.clone()

    models, world = together(size, body)
    assert world.in_flight == world.pending_receives == 0
    assert float(sum(models)[0]) == pytest.approx(26 * size, rel=1e-5)


@pytest.fixture
def saved() -> Any:
    """The states of 2 ranks after 5 steps of each."""

    def start(rank: Any, own: Any, z: Any) -> Any:
        steps(own, z, 5)
        own.synchronize_messages()
        return own.state_dict()

    return together(2, start)[0]


def test_a_state_goes_on_where_it_was(saved: Any) -> None:
    def body(rank: Any, own: Any, z: Any) -> Any:
        own.synchronize_messages()
        own.load_state_dict(saved[rank])
        assert torch.equal(z, saved[rank]["x"])
        own.resume()
        steps(own, z, 1)
        own.synchronize_messages()
        return own.progress

    assert together(2, body)[0] == [12, 12]


def test_a_state_of_another_algorithm_or_model_is_refused(saved: Any) -> None:
    def body(rank: Any, own: Any, z: Any) -> Any:
        own.synchronize_messages()
        refuse("state of another algorithm", own.load_state_dict, {"z": saved[0]["x"], "steps": 3})
        refuse(r"x has shape \(2,\), not \(11,\)", own.load_state_dict, {"x": torch.zeros(2), "steps": 3})

    together(2, body)


def test_nobody_waits_for_a_rank_without_a_step_in_an_epoch() -> None:
    """It has gone on as the others have, or they would wait for its messages until the timeout."""

    def idle(rank: Any, own: Any, z: Any) -> Any:
        for _ in range(3):
            own.synchronize_messages()
            own.begin_epoch(0)
            steps(own, z, 4 * (rank == 1))
        own.synchronize_messages()
        return own.progress

    assert together(2, idle, timeout=patient(30))[0] == [12, 12]


def optimizer_of(p: Any, transport: Any, lr: float) -> LocalOptimizer:
    inner = torch.optim.SGD([p], lr=lr)
    return LocalOptimizer(inner, [("p", p)], ADPSGD(timeout=patient(20)), transport=transport)


def test_closing_receives_what_is_on_its_way() -> None:
    """Also on ranks that close long before others do. Each step adds one to its rank's model."""
    world = ChannelWorld(3)

    def on_rank(rank: Any) -> Any:
        p = torch.nn.Parameter(torch.zeros(5))
        optimizer = optimizer_of(p, AgreedTransport(world.channels[rank]), 1.0)
        for _ in range(10 * (rank + 1)):
            optimizer.zero_grad()
            p.grad = torch.full((5,), -1.0)
            optimizer.step()
            threading.Event().wait(0.01)
        optimizer.close()
        optimizer.close()
        return p.detach()

    assert float(total(in_threads(3, on_rank))[0]) == pytest.approx(60, rel=1e-5)
    assert world.in_flight == world.pending_receives == 0


def test_no_rank_trains_before_all_are_connected() -> None:
    channels, connected = ChannelWorld(2), threading.Event()

    def connecting(transport: Any) -> None:
        def channel() -> Any:
            if transport.rank == 1:
                threading.Event().wait(0.3)
                connected.set()
            return channels.channels[transport.rank]

        transport.channel = channel
        optimizer = optimizer_of(torch.nn.Parameter(torch.zeros(3)), transport, 0.1)
        assert connected.is_set()
        optimizer.close()

    LockstepWorld(2).run(connecting)


def test_changes_of_a_rank_s_weights_by_the_user_are_kept() -> None:
    """Before the first step, during a pause, and between two steps."""
    world = ChannelWorld(2)

    def on_rank(rank: Any) -> Any:
        p, found = torch.nn.Parameter(torch.zeros(3)), []
        optimizer = optimizer_of(p, AgreedTransport(world.channels[rank]), 0.0)
        for start in (0.1, 0.7):
            p.data.fill_(start)
            with optimizer.consensus():
                found.append(p.tolist())
            for step in range(4):
                optimizer.zero_grad()
                p.grad = torch.ones(3)
                optimizer.step()
                if step == 1:
                    p.data.add_(1.0)
            optimizer.synchronize_messages()
            found.append(p.tolist())
        optimizer.close()
        return torch.tensor(found)

    mean = sum(in_threads(2, on_rank)) / 2
    torch.testing.assert_close(mean[:, 0], torch.tensor([0.1, 1.1, 0.7, 1.7]))


def test_arguments_that_cannot_be_are_refused() -> None:
    (channel,) = ChannelWorld(1).channels
    refuse("for 2 ranks, not for 1", begin, ADPSGD(lambda size: gossip.full(2)), torch.zeros(3), channel)
    refuse("averagings_per_step", ADPSGD, averagings_per_step=0)
    refuse("timeout", ADPSGD, timeout=0)


def test_calls_in_a_wrong_order_are_refused() -> None:
    (channel,) = ChannelWorld(1).channels
    own, z, refused = ADPSGD(), torch.zeros(3), partial(check_refusals, kind=RuntimeError)
    refused((own.synchronize_messages, "not been started"))
    begin(own, z, channel)
    refused((lambda: begin(own, z, channel), "started"))
    refused((own.state_dict, "synchronize_messages"), (lambda: own.load_state_dict({}), "synchronize_messages"))
    own.synchronize_messages()
    for number in (0, 1):
        steps(own, z, number)
        refused((lambda: own.update(lambda: None), "call the optimizer's zero_grad"))
    own.close()
    own.close()
    refused((own.begin_step, "closed"))


def test_a_failure_in_the_thread_of_a_rank_is_an_error_of_every_rank() -> None:
    def body(rank: Any, own: Any, z: Any) -> Any:
        if rank == 1:
            own._protocol.channel.isend = Mock(side_effect=OSError("the cable is cut"))
        with pytest.raises(GossipError, match="cable is cut" if rank == 1 else "rank 1 "):
            for _ in range(100_000):
                steps(own, z, 1)
                threading.Event().wait(0.001)

    together(3, body, timeout=patient(1))
