"""Traps of the original DGC trainer that the tests of the packages do not cover."""

from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from optim.nets import alone, dgc, dgc_sgd, wrap
from torch import nn

from dgc.comm.lockstep import LockstepWorld
from dgc_training.checkpoint.files import Checkpoints
from dgc_training.config import load
from dgc_training.startup.setup import prepare_device


def test_a_checkpoint_that_lost_a_file_is_removed_like_the_others(tmp_path: Path) -> None:
    """The original raises where an old file is not there."""

    def save(transport: Any) -> str | None:
        checkpoints = Checkpoints(tmp_path, transport)
        for name in (f"e000{epoch}" for epoch in range(1, 6)):
            checkpoints.save(name, {"name": name}, {"rank": transport.rank})
            if transport.rank == 0 and name == "e0003":
                (tmp_path / "e0002" / "rank0.pt").unlink()
        return checkpoints.find("latest")

    assert LockstepWorld(2).run(save) == ["e0005"] * 2 and not (tmp_path / "e0002").exists()


def test_determinism_that_makes_kernels_slow_is_not_forced() -> None:
    tree, threads = load(["configs/cifar/resnet20.py"]), torch.get_num_threads()
    assert tree.seed == 42 and tree.deterministic is False
    with torch.random.fork_rng():
        assert prepare_device(tree, "cpu", alone()) == torch.device("cpu")
    torch.set_num_threads(threads)
    assert not torch.are_deterministic_algorithms_enabled()


@on_ranks(3)
def test_gathered_data_have_a_planned_size(transport: Any) -> None:
    """The original sends as many elements as differ from zero, here fewer and fewer."""
    model, sent = nn.Linear(30, 20), [0]
    optimizer = wrap(model, transport, dgc_sgd, compression=dgc(0.05))
    for step in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 30) * (torch.arange(30) < 30 >> step)).sum().backward()
        optimizer.step()
        sent.append(optimizer.meter.payload_bytes)
    assert sent == pytest.approx([step * sent[1] for step in range(7)]) and sent[1] > 0
