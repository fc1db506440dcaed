"""Gradients near the end of fp32's range: dropped like NaN, or a finite mean; never an exception, and no trace."""

import pytest
import torch
from laws.definitions import DEFINITIONS
from laws.exchanges import EXCHANGES
from laws.quantized import QUANTIZED
from laws.table import TABLE, Row

from dgc.testing import Fleet, gradients

SIZE = 3


@pytest.mark.parametrize("row", [*TABLE, *EXCHANGES, *QUANTIZED, *DEFINITIONS], ids=lambda row: row.name)
@pytest.mark.usefixtures("no_type_checks")
def test_enormous_gradients_leave_no_trace(row: Row) -> None:
    for make in filter(None, (row.make, row.dense_limit)):
        for huge, who in ((3e38, [1]), (-3e38, [0, 1, 2])):
            fleet = Fleet(make, SIZE)
            fleet.step([gradients(rank, 0) for rank in range(SIZE)])
            for step in range(1, 3):
                own = [gradients(rank, step) for rank in range(SIZE)]
                before = fleet.errors()
                for rank in who:
                    own[rank][0].fill_(huge)
                    own[rank][2][1, 2, 3] = own[rank][4][7:90] = huge
                mean = fleet.step(own)[0]
                (nonfinite,) = set(fleet.nonfinite)
                assert nonfinite is not None or bool(torch.isfinite(mean).all())
                if row.keeps:
                    assert nonfinite is not None and f"gradient of p0 on rank {who[0]} " in nonfinite
                    for old, new, given in zip(before, fleet.errors(), own, strict=True):
                        counted = torch.cat([torch.where(g.abs() < 1e38, g, 0.0).view(-1) for g in given])
                        assert torch.equal(new.float(), old.float() + counted)
                assert all(bool(torch.isfinite(error).all()) for error in fleet.errors())
            for step in range(3, 5):
                means = fleet.step([gradients(rank, step) for rank in range(SIZE)])
                assert fleet.nonfinite == [None] * SIZE
                assert bool(torch.isfinite(means[0]).all()) and bool(means[0].any())
                assert all(torch.equal(means[0], mean) for mean in means)
            assert all(float(error.abs().max()) < 1e3 for error in fleet.errors())
