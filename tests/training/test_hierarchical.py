"""train.py on simulated machines of several ranks: what is chosen, printed and saved, and resuming anywhere."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from dgc.comm.lockstep import LockstepWorld
from dgc_training.checkpoint.reading import read_tensors
from dgc_training.config import ConfigError, load
from dgc_training.faults.failure import UsageError
from dgc_training.startup.arguments import parse_arguments
from dgc_training.startup.build import build_method, open_transport
from dgc_training.startup.setup import require_complete

pytestmark = pytest.mark.usefixtures("no_type_checks")
QUICK = [
    "--configs.train.num_epochs=1",
    "--configs.train.batch_size=64",
    "--configs.train.checkpoint_every=3",
    "--configs.train.check_replicas_every=1",
    "--configs.data.num_threads_per_worker=1",
    "--configs.model.width=4",
]


def settings(*words: str) -> tuple[Any, Any]:
    experiment = ["--configs", "configs/digits/cnn.py", "configs/dgc/wm0.py"]
    args, overrides = parse_arguments([*experiment, "--devices", "cpu", *QUICK, *words])
    return args, load(args.configs, overrides)


def run(directory: Path, size: int, local: int, *words: str) -> None:
    args, tree = settings("--run-dir", str(directory), *words)
    LockstepWorld(size, local).run(lambda transport: train.run(args, tree, transport))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two machines of two ranks; tests copy it."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    run(directory, 4, 2)
    return directory


def stopped_at(step: str, finished: Path, folder: Path) -> Path:
    """A copy of the run as it was after a step of its only epoch."""
    copied = folder / "run"
    shutil.copytree(finished, copied)
    (copied / "checkpoints/latest.json").write_text(json.dumps({"checkpoint": step}))
    for name in ("best.json", "e0001"):
        path = copied / "checkpoints" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return copied


def test_auto_is_on_with_several_machines_of_several_ranks(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "again", 4, 2)
    assert "gradients are compressed between 2 machines, and dense inside them" in capsys.readouterr().out
    run(tmp_path / "one", 2, 2)
    assert "between 2 machines" not in capsys.readouterr().out
    summary = json.loads((finished / "summary.json").read_text())
    assert 0 < summary["cross_wire_bytes"] < summary["dense_cross_wire_bytes"] / 2
    assert summary["cross_wire_bytes"] < summary["wire_bytes"]
    manifest = json.loads((finished / "checkpoints/e0001/manifest.json").read_text())
    assert manifest["machines"] == [0, 0, 1, 1]
    own = [read_tensors(finished / f"checkpoints/e0001/rank{rank}.pt")["compression"] for rank in range(4)]
    assert [state["part"]["tensors"] for state in own[:2]] == [state["part"]["tensors"] for state in own[2:]]
    assert own[0]["part"]["tensors"] == own[1]["part"]["others"]


def test_a_resumed_run_ends_bit_identical(finished: Path, tmp_path: Path) -> None:
    copied = stopped_at("e0000s00003", finished, tmp_path)
    run(copied, 4, 2)
    for file in ("shared.pt", "rank1.pt"):
        a, b = (read_tensors(path / "checkpoints/e0001" / file) for path in (finished, copied))
        first, second = (a["model"], b["model"]) if file == "shared.pt" else (a["compression"], b["compression"])
        assert repr(first) == repr(second)
    states = [read_tensors(path / "checkpoints/e0001/shared.pt")["model"] for path in (finished, copied)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(("size", "local"), [(2, 2), (4, 4), (6, 3)])
def test_a_run_goes_on_with_other_machines_and_warns(
    size: int, local: int, finished: Path, tmp_path: Path
) -> None:
    copied = stopped_at("e0000s00003", finished, tmp_path)
    with pytest.warns(UserWarning, match="unsent gradients .* redistributed so that their mean"):
        run(copied, size, local)
    assert json.loads((copied / "summary.json").read_text())["ranks"] == size


def test_a_damaged_file_of_a_needed_rank_is_named(finished: Path, tmp_path: Path) -> None:
    copied = stopped_at("e0000s00003", finished, tmp_path)
    (copied / "checkpoints/e0000s00003/rank3.pt").write_bytes(b"nothing")
    with pytest.raises(UsageError, match=r"rank3.pt is not the file that was written.*needed because 2 ranks"):
        run(copied, 2, 2)


def test_settings_of_the_levels() -> None:
    asked: list[Any] = []

    def connect(**options: Any) -> Any:
        asked.append(options["hierarchical"])

    for word in ("auto", "on", "off"):
        _, tree = settings(f"--configs.train.hierarchical={word}")
        require_complete(tree, "cpu")
        open_transport(tree.train, build_method(tree.train), connect)
    assert asked == ["auto", True, False]
    _, tree = settings("--configs.train.hierarchical=maybe")
    with pytest.raises(ConfigError, match="train.hierarchical is 'maybe', not auto, on or off"):
        require_complete(tree, "cpu")
    args, overrides = parse_arguments(
        ["--configs", "configs/digits/cnn.py", "configs/gossip/sgp.py", "--configs.train.hierarchical=on"]
    )
    with pytest.raises(ConfigError, match=r"stack configs/gossip/machines.py"):
        require_complete(load(args.configs, overrides), "cpu")
