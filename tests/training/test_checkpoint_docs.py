"""docs/checkpoints.md: its tables name what is saved, and its code runs as it stands there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from documented import code, table
from pytest import MonkeyPatch
from simulated import train_on
from torch import nn

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DGCCompressor
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from dgc_training.checkpoint.reading import read_tensors

PAGE = "checkpoints.md"
INFERENCE, FROM_CONFIG, LOOP, OTHER_SIZE = code(PAGE)


def keys(first: str) -> set[str]:
    return {row[0].strip("`") for row in table(first, PAGE)}


@pytest.mark.usefixtures("no_type_checks")
def test_the_files_of_a_run_and_inference(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("runs/[digits.cnn+dgc.wm5].np4")
    words = ["--configs", "configs/digits/cnn.py", "configs/dgc/wm5.py", "--run-dir", str(run), "--devices", "cpu"]
    train_on(2, [*words, "--configs.train.num_epochs=1", "--configs.train.batch_size=180"])

    names = {path.name for path in (run / "checkpoints").rglob("*")}
    assert names == {"latest.json", "best.json", "e0001", "shared.pt", "rank0.pt", "rank1.pt", "manifest.json"}
    shared, own = (read_tensors(run / "checkpoints/e0001" / name) for name in ("shared.pt", "rank1.pt"))
    assert shared.keys() == keys("key of `shared.pt`") and own.keys() == keys("key of `rankN.pt`")
    assert own["compression"]["DGCCompressor.0"].keys() >= {"momentums", "velocities", "steps"}

    scope: dict[str, Any] = {}
    for block in (INFERENCE, FROM_CONFIG):
        exec(block, scope)
        for name, value in scope["model"].state_dict().items():
            assert torch.equal(value, shared["model"][name]), name


def one_of(transport: Any) -> tuple[nn.Module, DistributedOptimizer]:
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    compression = DGCCompressor(0.01, memory=DGCSGDMemory(0.9))
    sgd = DGCSGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, DistributedOptimizer(sgd, model.named_parameters(), compression, transport=transport)


def step(model: nn.Module, optimizer: DistributedOptimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(100 * seed + optimizer.transport.rank)
    optimizer.zero_grad()
    model(torch.randn(8, 40, generator=generator)).square().mean().backward()
    optimizer.step()


@pytest.mark.usefixtures("no_type_checks")
def test_your_own_loop(tmp_path: Path) -> None:
    scope: dict[str, Any] = {}
    exec(LOOP, scope)
    exec(OTHER_SIZE, scope)

    def whole(transport: Any) -> tuple[dict[str, Any], Any]:
        model, optimizer = one_of(transport)
        for i in range(3):
            step(model, optimizer, i)
        scope["save"](tmp_path, model, optimizer, 7)
        velocity = optimizer.compression_state_dict()["DGCCompressor.0"]["velocities"]["weight"]
        for i in range(3, 6):
            step(model, optimizer, i)
        return model.state_dict(), velocity

    def resumed(transport: Any) -> dict[str, Any]:
        model, optimizer = one_of(transport)
        assert scope["resume"](tmp_path, model, optimizer) == 7
        optimizer.begin_epoch(7)
        for i in range(3, 6):
            step(model, optimizer, i)
        return model.state_dict()

    def smaller(transport: Any) -> Any:
        model, optimizer = one_of(transport)
        with pytest.raises(ValueError, match="saved by 4 ranks, not 2"):
            scope["resume"](tmp_path, model, optimizer)
        optimizer.load_compression_state_dict(scope["own_share"](tmp_path, 4, optimizer))
        return optimizer.compression_state_dict()["DGCCompressor.0"]["velocities"]["weight"]

    states, velocities = zip(*LockstepWorld(4).run(whole), strict=True)
    for state, again in zip(states, LockstepWorld(4).run(resumed), strict=True):
        assert all(torch.equal(state[name], again[name]) for name in state)
    assert not torch.equal(velocities[0], velocities[1])
    mean = torch.stack(LockstepWorld(2).run(smaller)).mean(0)
    torch.testing.assert_close(mean, torch.stack(velocities).mean(0))
