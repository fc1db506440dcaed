"""dgc/paper is the definition: the fast PowerSGD, SGP, OSGP and CHOCO-SGD do the same over 50 steps.

A bound is relative to the largest magnitude of the definition's outcome, and in units of ULP.
"""

from functools import partial
from typing import Any
from zlib import crc32

import pytest
import torch
from core.ranks import Ranks, normal
from torch import Tensor, nn

from dgc import gossip
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import PowerSGDCompressor
from dgc.contrib import CHOCO, Sign, TopK
from dgc.gossip import OSGP, SGP, Topology
from dgc.optim import LocalOptimizer
from dgc.paper.choco import choco_sgd, scaled_sign, top_k
from dgc.paper.powersgd import PowerSGD
from dgc.paper.sgp import osgp, sgp
from dgc.testing import Fleet

STEPS = 50
ULP = 2.0**-24
SIZES = (1, 2, 3)
pytestmark = pytest.mark.usefixtures("no_type_checks")


def distance(found: Any, wanted: Any) -> Any:
    """In units of ULP."""
    return float((found.double() - wanted).abs().max() / wanted.abs().max()) / ULP


# --- PowerSGD --------------------------------------------------------------------------------------

MATRICES = {"p0": (12, 20), "p1": (8,), "p2": (12, 20), "p3": (6, 3, 2, 2)}


def test_powersgd() -> None:
    """Products are added up in another order, and orthogonalization makes rounding larger where columns are nearly
    dependent. Each step begins with the fast one's state: over steps rounding grows, until with warm start and
    error feedback the definition itself, in fp32, is far from itself in fp64.
    """
    for size, rank in ((1, 1), (2, 2), (3, 1), (3, 4)):
        for warm_start, error_feedback in ((True, True), (True, False), (False, True), (False, False)):
            case = (size, rank, warm_start, error_feedback)
            assert farthest(*case) < 128, case


def farthest(size: Any, rank: Any, warm_start: Any, error_feedback: Any) -> Any:
    """The largest distance of an update, an error or a factor."""
    settings: dict[str, Any] = {"mode": "paper", "min_compression_rate": 0, "orthogonalization": "gram_schmidt"}
    options, shapes = {"warm_start": warm_start, "error_feedback": error_feedback}, MATRICES.values()
    fast = Fleet(lambda: PowerSGDCompressor(rank, **settings, **options), size, [torch.zeros(s) for s in shapes])

    def draw(name: Any, t: Any, m: Any, r: Any) -> Any:
        generator = torch.Generator().manual_seed(crc32(f"0 {name} Q {t} -1".encode()))
        return torch.randn(r, m, generator=generator, dtype=torch.float32).T

    defined, worst = Ranks(size, lambda: PowerSGD(rank, draw, **options), MATRICES, torch.float64), 0.0
    segments = [segment for segment in defined.buckets[0].segments if len(segment.shape) > 1]
    states = [c.state_dict() for c in fast.states]
    for t in range(STEPS):
        for own, bucket, state in zip(defined.states, defined.buckets, states, strict=True):
            for segment in segments if state.get("errors") else ():
                segment.of(own[bucket].errors["e"]).copy_(state["errors"][segment.name])
            own[bucket].Q = {name: Q.double() for name, Q in state["Q"].items()}
        given = [[normal(*s, seed=100 * t + 10 * r + i) for i, s in enumerate(shapes)] for r in range(size)]
        vectors = [torch.cat([g.flatten() for g in gradients]).double() for gradients in given]
        worst = max(worst, distance(fast.step(given)[0], defined.step(vectors)))
        states = [c.state_dict() for c in fast.states]
        for found, own, bucket in zip(states, defined.states, defined.buckets, strict=True):
            errors = {s.name: s.of(own[bucket].errors["e"]) for s in segments}
            for part, wanted in (("errors", errors), ("Q", own[bucket].Q)):
                pairs = [(found.get(part, {})[name], tensor) for name, tensor in wanted.items() if tensor.any()]
                assert len(pairs) == 3 * (part == "Q" or error_feedback)
                worst = max([worst, *(distance(*pair) for pair in pairs)])
    return worst


# --- Gossip ----------------------------------------------------------------------------------------

SHAPES = ((7, 5), (5,), (3, 2, 4))
NUMELS = [torch.Size(shape).numel() for shape in SHAPES]
# powers of two: products with them are exact, whether or not a sum with them is fused
LR, MOMENTUM = 0.0625, 0.5
START = normal(sum(NUMELS), seed=1)


def curvature_and_target(rank: Any) -> Any:
    return 0.5 + normal(sum(NUMELS), seed=10 + rank).abs() / 2, normal(sum(NUMELS), seed=20 + rank)


def trained(size: Any, make: Any) -> Any:
    """By rank: the models that gradients were computed at, and the last one."""

    def body(transport: Any) -> Any:
        parts = [nn.Parameter(part.view(s)) for part, s in zip(START.split(NUMELS), SHAPES, strict=True)]
        named = [(f"p{i}", p) for i, p in enumerate(parts)]
        sgd = torch.optim.SGD(parts, lr=LR, momentum=MOMENTUM)
        optimizer = LocalOptimizer(sgd, named, make(), transport=transport)
        curvature, target = curvature_and_target(transport.rank)
        seen = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            z = optimizer.model.z.clone()
            seen.append(z)
            for p, g in zip(parts, (curvature * (z - target)).split(NUMELS), strict=True):
                p.grad = g.view(p.shape)
            optimizer.step()
        optimizer.synchronize_messages()
        return torch.stack([*seen, optimizer.model.z])

    return torch.stack(LockstepWorld(size).run(body))


def defined(size: Any, algorithm: Any, dtype: Any) -> Any:
    """The same of the definition: algorithm(x, gradient, i)."""
    seen: list[list[Tensor]] = [[] for _ in range(size)]

    def gradient(i: Any) -> Any:
        curvature, target = (part.to(dtype) for part in curvature_and_target(i))
        momentum = torch.zeros_like(target)

        def direction(z: Any, k: Any) -> Any:
            nonlocal momentum
            seen[i].append(z)
            momentum = MOMENTUM * momentum + curvature * (z - target)
            return momentum

        return direction

    conversations = [algorithm(START.to(dtype), gradient(i), i=i) for i in range(size)]
    ends = LockstepWorld(size).converse("definition", conversations)
    return torch.stack([torch.stack([*own, end]) for own, end in zip(seen, ends, strict=True)])


def topology_of(graph: Any, size: Any) -> Any:
    return Topology("alone", 1, 1, lambda rank, round: ()) if size == 1 else graph(size)


def same(found: Any, algorithm: Any, bound: Any) -> Any:
    """bound: 0 for the same bits."""
    size = found.shape[0]
    assert found.shape == (size, STEPS + 1, sum(NUMELS)) and not torch.equal(found[:, 0], found[:, -1])
    if bound:
        return distance(found, defined(size, algorithm, torch.float64)) < bound
    return torch.equal(found, defined(size, algorithm, torch.float32))


def graphs(size: Any) -> Any:
    """Of 2 ranks all are the same."""
    return (gossip.n_peer_exponential, *((gossip.ring, gossip.full, gossip.star) if size == 3 else ()))


def graphs_of(size: int) -> list[tuple[int, Any]]:
    return [(size, graph) for graph in graphs(size)]


every_graph = pytest.mark.parametrize(("size", "graph"), [pair for size in SIZES for pair in graphs_of(size)])


def check_gossip(size: int, graph: Any, make: Any, definition: Any, bound: int) -> None:
    options = {"gamma": LR, "topology": topology_of(graph, size), "mixing": gossip.uniform, "K": STEPS}
    assert same(trained(size, partial(make, graph)), partial(definition, **options), bound)


@every_graph
def test_sgp(size: int, graph: Any) -> None:
    """The same bits where weights stay 1, on regular graphs. Where they do not, the fast one keeps z and w and
    lets the optimizer move z, so that x = w z is rounded once more in each step.
    """
    check_gossip(size, graph, SGP, sgp, 16 if graph is gossip.star else 0)


@every_graph
def test_osgp(size: int, graph: Any) -> None:
    """Weights are 1 on one rank only: see `test_sgp`."""
    check_gossip(size, graph, OSGP, osgp, 16 if size > 1 else 0)


@every_graph
def test_the_biased_ablation_of_osgp(size: int, graph: Any) -> None:
    check_gossip(size, graph, partial(OSGP, biased=True), partial(osgp, biased=True), 0)


def in_fp16(q: Any) -> Any:
    """Scaled by the power of two that puts the largest magnitude just below 2**15."""
    exponent = 15 - torch.frexp(q.abs().max())[1]
    return torch.ldexp(torch.ldexp(q, exponent).half().to(q.dtype), -exponent)


def by_tensor(operator: Any, after: Any = None) -> Any:
    def Q(v: Any) -> Any:
        q = torch.cat([operator(part) for part in v.split(NUMELS)])
        return q if after is None else after(q)

    return Q


def test_choco() -> None:
    """The fast one keeps d, the sum over j of w_ij (xhat_j - xhat_i), and changes it by what arrives: sums in
    another order. In fp16 a value that lies between two others may be rounded to either: half an ulp of fp16.
    """

    def quarter(v: Any) -> Any:
        return top_k(v, -(-v.numel() // 4))

    graphs: list[Any] = [*((size, gossip.two_way_ring) for size in SIZES), (3, gossip.star)]
    for size, graph in graphs:
        topology = topology_of(graph, size)
        for quantizer, gamma, Q, bound in (
            (TopK(0.25), None, by_tensor(quarter), 16),
            (TopK(0.25), 0.25, by_tensor(quarter), 16),
            (TopK(0.25, "fp16"), 0.25, by_tensor(quarter, in_fp16), 2.0**-12 / ULP),
            (Sign(), None, by_tensor(scaled_sign), 16),
        ):
            step = quantizer.gamma if gamma is None else gamma

            def worker(x: Any, g: Any, i: Any, topology: Any = topology, step: Any = step, Q: Any = Q) -> Any:
                return choco_sgd(x, g, LR, step, Q, gossip.metropolis(topology, i, 0), i, STEPS)

            found = trained(size, partial(CHOCO, graph, quantizer=quantizer, gamma=gamma))
            assert same(found, worker, bound), (size, graph, quantizer, gamma)
