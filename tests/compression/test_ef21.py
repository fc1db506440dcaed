"""EF21 around compressors: the paper's definition, and Muon's momentum without compression."""

from functools import partial
from typing import Any

import pytest
import torch
from compression.ranks import Ranks, normal
from optim import nets

from dgc import paper
from dgc.compression import DenseCompressor, DGCCompressor, EF21Compressor
from dgc.engine.redistribute import redistribute
from dgc.memory import ResidualMemory
from dgc.optim import MuonWithAdamW, muon_groups

pytestmark = pytest.mark.usefixtures("no_type_checks")
SHAPES = [(40, 5), (3, 7)]
N = 221


def top_k(ratio: float = 0.1, beta: float = 0.2) -> Any:
    return EF21Compressor(DGCCompressor(ratio, ResidualMemory(), selector="exact"), beta)


def test_the_definition_and_estimates_and_momenta_differ_by_the_errors() -> None:
    for size in (1, 3):
        fast, defined = Ranks(size, top_k, SHAPES), Ranks(size, partial(paper.EF21, 0.1, 0.2), SHAPES)
        for step in range(12):
            own = [normal(N, seed=10 * step + rank) for rank in range(size)]
            torch.testing.assert_close(fast.step(own), defined.step(own), rtol=0, atol=1e-6)
    # After a dropped step too.
    ranks = Ranks(3, top_k, SHAPES)
    for step in range(5):
        own = [normal(N, seed=10 * step + rank) for rank in range(3)]
        if step == 3:
            own[1][7] = float("nan")
        (result, *_), _ = ranks.exchange(own)
        assert (result.nonfinite is not None) == (step == 3)
        if step == 3:
            for states, bucket in zip(ranks.states, ranks.buckets, strict=True):
                states.rollback(bucket)
    saved: list[Any] = [states.state_dict() for states in ranks.states]
    for loaded in (saved, redistribute(saved, 2), redistribute(saved, 5)):
        for name, shape in zip(("p0", "p1"), SHAPES, strict=True):
            parts = [[state[table][name].double() for state in loaded] for table in ("momentum", "residuals")]
            difference = sum(m - e for m, e in zip(*parts, strict=True)) / len(loaded)
            assert difference.shape == shape
            torch.testing.assert_close(difference, loaded[0]["estimate"][name].double(), rtol=0, atol=1e-6)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9")
def test_without_compression_it_is_muon_without_nesterov() -> None:
    def muon(model: Any, **options: Any) -> Any:
        return MuonWithAdamW(muon_groups(model, ["last.*"]), lr=0.01, ns_precision="fp32", **options)

    model, other = nets.net(), nets.net()
    for net in (model, other):
        for p in (net.first.bias, net.spare.bias, *net.last.parameters()):
            p.requires_grad_(False)
    method = EF21Compressor(DenseCompressor())
    nets.train(model, nets.wrap(model, nets.alone(), partial(muon, momentum=0.0), compression=method), range(5))
    nets.train(other, muon(other, nesterov=False), range(5))
    nets.assert_same(model, other)
