"""CHOCO-SGD and PowerGossip: state of both ends of an edge, limits, refused arguments and states."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from cases import case
from gossip.networks import Trained, each, mean, off, on, same
from on_ranks import on_ranks
from refusals import check_refusals

from dgc import contrib, gossip
from dgc.contrib.powergossip import as_matrix, orthonormal
from dgc.core.bucket import Segment
from dgc.engine.redistribute import blend, shares
from dgc.gossip import TopologyError
from dgc.local import OuterSteps, SlowMo
from dgc.sparse.payloads import PayloadError

pytestmark = pytest.mark.usefixtures("no_type_checks")


def stepped(transport: Any, algorithm: Any, steps: Any) -> Any:
    own = Trained(transport, algorithm)
    own.go_apart()
    own.scatter().steps(steps)
    own.finish()
    return own


def sent_in_steps(average_every: int) -> list[tuple[list[int], float]]:
    """By rank of 3, the bytes until each of 7 steps, and the ratio. A rank trains alone until an exchange."""

    def body(transport: Any) -> tuple[list[int], float]:
        own = Trained(transport, contrib.CHOCO(quantizer=contrib.TopK(0.25), average_every=average_every))
        alone, sent = Trained(transport, OuterSteps(100)), []
        for step in range(7):
            own.step()
            sent.append(own.optimizer.meter.payload_bytes)
            alone.step()
            assert torch.equal(own.z, alone.z) or step >= average_every - 1
        own.finish()
        return sent, own.algorithm.compress_ratio

    return on(3, body)


def test_between_exchanges_every_rank_trains_alone() -> None:
    for (sent, ratio), ((one, *_), plain) in zip(sent_in_steps(3), sent_in_steps(1), strict=True):
        assert sent == [0, 0, one, one, one, 2 * one, 2 * one] and ratio == plain / 3


def test_a_rank_knows_the_differences_of_public_copies() -> None:
    """d_i is the sum over j of W_ij (xhat_j - xhat_i), and the error is x - xhat."""

    def differences_of(transport: Any) -> Any:
        own = stepped(transport, contrib.CHOCO(), 15).algorithm
        assert off(next(iter(own.errors())), own.z - own.xhat) < 1e-6
        return own.xhat.double(), own.d.double()

    xhat, differences = zip(*on(5, differences_of), strict=True)
    for i, d in enumerate(differences):
        assert off(d, sum((xhat[j] - xhat[i]) / 3 for j in ((i + 1) % 5, (i - 1) % 5))) < 1e-5
    assert float(sum(differences).abs().max()) < 1e-5


@pytest.mark.parametrize("outer", [None, SlowMo()], ids=["mean", "SlowMo"])
def test_after_an_average_over_all_ranks_no_error_remains(outer: Any) -> None:
    def body(own: Any) -> Any:
        own.steps(4)
        assert not next(iter(own.algorithm.errors())).any()
        return own.z.clone()

    models = each(3, lambda: OuterSteps(4, contrib.CHOCO(), outer), body)
    assert same(models, [models[0]] * 3)


def test_a_rank_with_a_model_that_is_not_finite_is_named() -> None:
    def spoilt(own: Any) -> None:
        if own.rank == 1:
            own.z[7] = float("nan")
        own.only_gossip()
        own.finish()

    with pytest.raises(PayloadError, match="rank 1 sent values that are not finite"):
        each(3, contrib.CHOCO, spoilt)


@pytest.mark.parametrize("graph", [gossip.two_way_ring, gossip.star, gossip.grid, gossip.random_matching])
@pytest.mark.parametrize("algorithm", [contrib.CHOCO, contrib.PowerGossip])
def test_another_number_of_ranks_goes_on(algorithm: Any, graph: Any) -> None:
    """The state about neighbours is reset."""
    if algorithm is contrib.CHOCO and graph is gossip.random_matching:
        graph = gossip.full
    make, new = partial(algorithm, graph), 3
    states = on(5, lambda t: stepped(t, make(), 5).algorithm.state_dict())

    def body(transport: Any) -> Any:
        own, weights = Trained(transport, make()), shares(5, new, transport.rank)
        own.algorithm.load_state_dict(blend({rank: copy.deepcopy(states[rank]) for rank in weights}, weights))
        start = own.z.clone()
        own.only_gossip(100)
        return start, own.finish()

    starts, ends = zip(*on(new, body), strict=True)
    assert off(mean(starts), mean([state["z"] for state in states])) < 1e-6
    assert off(sum(ends), sum(starts)) < 1e-4
    assert float((ends[0] - ends[1]).norm()) < 0.05 * float((starts[0] - starts[1]).norm())


@on_ranks(5)
def test_states_of_another_graph_or_algorithm_are_refused(transport: Any) -> None:
    def lazy(topology: Any, rank: Any, round: Any) -> Any:
        """Half of the shares that metropolis sends."""
        shares = gossip.metropolis(topology, rank, round)
        return {to: (share + (to == rank)) / 2 for to, share in shares.items()}

    state = stepped(transport, contrib.CHOCO(), 2).algorithm.state_dict()
    others: list[dict[str, Any]] = [{"graph": gossip.full}, {"graph": gossip.star}, {"mixing": lazy}]
    for other in others:
        own = Trained(transport, contrib.CHOCO(**other))
        before = own.z.clone()
        with case(other), pytest.raises(ValueError, match="state of another graph or mixing"):
            own.algorithm.load_state_dict(state)
        assert torch.equal(own.z, before)
    power = Trained(transport, contrib.PowerGossip()).algorithm
    wider = stepped(transport, contrib.PowerGossip(rank=2), 2).algorithm.state_dict()
    check_refusals(
        (lambda: power.load_state_dict(state), "state of another algorithm"),
        (lambda: power.load_state_dict(wider), "PowerGossip with another rank"),
    )


def test_a_difference_of_rank_1_is_gone_after_a_step() -> None:
    def differ(own: Any) -> Any:
        generator = torch.Generator().manual_seed(own.rank)
        for p in own.model.parameters():
            part = torch.randn(p.shape[0], 1, generator=generator)
            other = torch.randn(1, p.numel() // p.shape[0], generator=torch.Generator().manual_seed(9))
            p.data.add_((part @ other).view(p.shape))
        own.only_gossip()
        return own.finish()

    assert off(*each(2, contrib.PowerGossip, differ)) < 1e-4


@pytest.mark.parametrize("size", [2, 4])
def test_the_ends_of_an_edge_have_the_same_factor(size: int) -> None:
    def factors_of(transport: Any) -> Any:
        edges = stepped(transport, contrib.PowerGossip(rank=2, num_iters_per_step=1), 7).algorithm._edges.items()
        return {peer: (edge.even, torch.cat([f.view(-1) for f in edge.factors])) for peer, edge in edges}

    found = on(size, factors_of)
    for i, edges in enumerate(found):
        for j, (even, factors) in edges.items():
            assert not even and torch.equal(factors, found[j][i][1])


NOISE = orthonormal(torch.randn(30, 3, generator=torch.Generator().manual_seed(1)), torch.zeros(30, 3))
COLUMN = torch.randn(30, 1, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    "Y",
    [
        torch.zeros(30, 3),
        COLUMN * torch.tensor([1.0, 2.0, 0.0]),
        1e-35 * torch.randn(30, 3, generator=torch.Generator().manual_seed(3)),
        1e30 * NOISE,
    ],
    ids=["zeros", "dependent", "tiny", "huge"],
)
def test_factors_stay_orthonormal(Y: torch.Tensor) -> None:
    Q = orthonormal(Y, NOISE)
    assert off(Q.T @ Q, torch.eye(3)) < 1e-5


def test_orthonormal_factors_span_the_columns() -> None:
    Q = orthonormal(COLUMN.expand(30, 3), NOISE)
    assert off(Q @ (Q.T @ COLUMN), COLUMN) < 1e-4


@pytest.mark.parametrize(
    ("size", "stride", "rank", "expected"),
    [
        ((8, 5), (5, 1), 1, (3, 8, 5, 1)),
        ((8, 5), (1, 8), 1, (3, 5, 8, 1)),
        ((8, 4, 3, 3), (36, 1, 12, 4), 1, (3, 8, 36, 1)),
        ((8, 5), (5, 1), 4, None),
        ((40,), (1,), 1, None),
        ((1, 40), (40, 1), 1, None),
        ((0, 5), (5, 1), 1, None),
        ((), (), 1, None),
    ],
)
def test_a_matrix_has_the_memory_order_of_its_tensor(size: Any, stride: Any, rank: int, expected: Any) -> None:
    found = as_matrix(Segment("", 3, torch.Size(size).numel(), size, stride), rank, 2)
    assert (found and (found.offset, found.n, found.m, found.r)) == expected


UNEVEN = gossip.mixing_from_weights([[[0.5, 0.25, 0.25], [0.25, 0.75, 0.0], [0.25, 0.0, 0.75]]])
SKEWED = gossip.mixing_from_weights([[[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5]]])


def start(make: Any, size: int, local_size: Any = None) -> None:
    on(size, lambda transport: Trained(transport, make()), local_size)


CHANGING, SLICES = gossip.bipartite_exponential, "slices of a model, which have no matrices"


@pytest.mark.parametrize(
    ("make", "size", "words"),
    [
        (lambda: gossip.DPSGD(gossip.star), 4, "the shares that rank 0 receives sum to"),
        (lambda: gossip.SGP(CHANGING), 3, "even number of ranks"),
        (lambda: gossip.SGP(lambda n: gossip.ring(n + 1)), 3, "is for 4 ranks, not for 3"),
        (lambda: contrib.CHOCO(CHANGING), 8, "but they change: use ring with peers=2, grid"),
        (lambda: contrib.CHOCO(gossip.ring), 4, "edges in both directions, .* use ring with peers=2"),
        (lambda: contrib.CHOCO(lambda n: gossip.two_way_ring(n + 1)), 4, "is for 5 ranks, not for 4"),
        (lambda: contrib.CHOCO(gossip.star, gossip.uniform), 4, "the shares that rank 0 receives sum to"),
        (lambda: contrib.CHOCO(gossip.full, SKEWED), 3, "the same weight at both ends of an edge: use"),
        (lambda: contrib.PowerGossip(gossip.n_peer_exponential), 8, "or a graph of pairs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_graph_that_an_algorithm_cannot_use_is_refused(make: Any, size: int, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        start(make, size)


def test_weights_that_are_equal_at_both_ends_of_each_edge_are_accepted() -> None:
    start(lambda: contrib.CHOCO(gossip.star, UNEVEN), 3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gossip.OSGP(synch_freq=-1), "synch_freq must be 0 or more"),
        (lambda: gossip.SGP(graph_from_epoch={-1: None}), "counts epochs from 0"),
        (lambda: contrib.CHOCO(gamma=0.0), "gamma must be a step size"),
        (lambda: contrib.TopK(0.0), "ratio must be a fraction"),
        (lambda: contrib.TopK(0.1, "fp8"), "must be fp16 or bf16"),
        (lambda: contrib.PowerGossip(rank=0), "must be at least 1"),
        (lambda: contrib.PowerGossip(rank=9), "would send all 4 tensors uncompressed"),
        (lambda: gossip.HierarchicalGossip(contrib.PowerGossip()), SLICES),
        (lambda: gossip.HierarchicalGossip(OuterSteps(4, contrib.PowerGossip())), SLICES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_that_cannot_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        start(make, 4, 2)


def test_a_state_with_nan_is_refused() -> None:
    """In every tensor of the state. A wrong dtype is refused as well."""

    def tensors(state: Any) -> Any:
        for key, value in state.items():
            if isinstance(value, dict):
                yield from tensors(value)
            elif isinstance(value, torch.Tensor) and value.is_floating_point():
                yield state, key, value

    def body(transport: Any, make: Any) -> None:
        own = stepped(transport, make(), 3).algorithm
        state = own.state_dict()
        for holder, key, tensor in list(tensors(state)):
            for wrong, message in ((tensor * float("nan"), "has NaN or inf"), (tensor.to(torch.half), "has type")):
                holder[key] = wrong
                with pytest.raises(ValueError, match=message):
                    own.load_state_dict(state)
            holder[key] = tensor
        own.load_state_dict(state)

    outer = (partial(OuterSteps, 2), lambda: OuterSteps(2, gossip.SGP()))
    for make in (gossip.SGP, gossip.OSGP, gossip.DPSGD, contrib.CHOCO, contrib.PowerGossip, *outer):
        on(2, partial(body, make=make))
