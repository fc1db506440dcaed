"""Warnings point at the line of the user's script from which the library was called."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# the comment of a line is the beginning of what it warns of
SCRIPT = """
import torch
from torch import nn

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DGCCompressor, EF21Compressor, PowerSGDCompressor, SparseCompressor
from dgc.gossip import SGP
from dgc.optim import DistributedOptimizer, LocalOptimizer

alone = dict(transport=LockstepWorld(1).transports[0])


def built(make=torch.optim.SGD, **options):
    model = nn.Linear(8, 8)
    inner = make(model.parameters(), lr=0.1)
    return model, DistributedOptimizer(inner, model.named_parameters(), **options, **alone)


SparseCompressor(50, "residual")  # compress_ratio=50 is read as the factor saved
DGCCompressor(0.1, "residual", values="fp16", fp16_values=True)  # values=fp16 is used

model, optimizer = built()
model(torch.full((1, 8), torch.nan)).sum().backward()
optimizer.step()  # the gradient of

model, optimizer = built(compression=SparseCompressor(0.1, "residual", warmup_epochs=2))
model(torch.ones(1, 8)).sum().backward()  # SparseCompressor depends on the epoch

model, optimizer = built()
model(torch.ones(1, 8)).sum().backward()
optimizer.synchronize()
optimizer.step()  # optimizer.step() called without

model = nn.Linear(8, 8)
inner = torch.optim.Adam(model.parameters(), lr=0.1)
DistributedOptimizer(inner, model.named_parameters(), num_groups=2, **alone).close()  # groups and num_groups
top_k = SparseCompressor(0.1, "residual")
DistributedOptimizer(inner, model.named_parameters(), top_k, **alone)  # SparseCompressor sends

model = nn.Linear(8, 8)
inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
ef21 = EF21Compressor(SparseCompressor(0.1, "residual"))
DistributedOptimizer(inner, model.named_parameters(), ef21, **alone)  # EF21Compressor has momentum

model = nn.Linear(8, 8)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
DistributedOptimizer(inner, model.named_parameters(), DGCCompressor(0.1), **alone)  # the memory applies momentum

model = nn.Linear(2, 2)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
DistributedOptimizer(inner, model.named_parameters(), PowerSGDCompressor(4), **alone)  # PowerSGDCompressor sends

model = nn.Linear(8, 8)
optimizer = LocalOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), SGP(), **alone)
optimizer.zero_grad()
model(torch.full((1, 8), torch.nan)).sum().backward()
optimizer.step()  # the gradient of weight on rank 0 has NaN or inf: this rank
optimizer.close()
"""
EXPECTED = [
    (number, line.partition("  # ")[2]) for number, line in enumerate(SCRIPT.splitlines(), 1) if "  # " in line
]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    script = tmp_path_factory.mktemp("warn") / "script.py"
    script.write_text(SCRIPT)
    # in a process of its own, because tests check types by functions around the library's functions
    done = subprocess.run(
        [sys.executable, "-W", "always", script],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "DGC_KERNELS": "reference"},
        check=True,
    )
    return done.stderr


@pytest.mark.parametrize(("number", "words"), EXPECTED, ids=[words[:30] for _, words in EXPECTED])
def test_a_warning_points_at_the_line_of_the_user(printed: str, number: int, words: str) -> None:
    assert re.search(rf"script\.py:{number}: UserWarning: {re.escape(words)}", printed), printed


def test_no_warning_points_at_a_line_of_the_library(printed: str) -> None:
    assert re.findall(r"^(?!.*script\.py).*: UserWarning: .*", printed, re.M) == []
