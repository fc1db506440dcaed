"""train.py on simulated machines of several ranks: what is chosen, printed and saved."""

import json
from pathlib import Path
from typing import Any

import pytest
from simulated import CNN, rewound, saved, summary_of, train_in

from dgc_training.config import load
from dgc_training.faults.failure import UsageError
from dgc_training.startup.build import build_method, open_transport

STACK = [CNN, "configs/dgc/wm0.py"]
QUICK = "train.num_epochs=1 train.batch_size=64 train.checkpoint_every=3 train.check_replicas_every=1".split()
QUICK += ["data.num_threads_per_worker=1", "model.width=4"]


@pytest.mark.usefixtures("no_type_checks")
def test_auto_is_on_with_several_machines_of_several_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_in(tmp_path / "two", STACK, QUICK, size=4, local_size=2)
    assert "gradients are compressed between 2 machines, and dense inside them" in capsys.readouterr().out
    train_in(tmp_path / "one", STACK, QUICK, size=2, local_size=2)
    assert "between 2 machines" not in capsys.readouterr().out
    summary = summary_of(tmp_path / "two")
    assert 0 < summary["cross_wire_bytes"] < summary["dense_cross_wire_bytes"] / 2
    assert summary["cross_wire_bytes"] < summary["wire_bytes"]
    manifest = json.loads((tmp_path / "two/checkpoints/e0001/manifest.json").read_text())
    assert manifest["machines"] == [0, 0, 1, 1]
    files = saved(tmp_path / "two")
    parts = [files[f"rank{rank}"]["compression"]["part"] for rank in range(4)]
    assert [part["tensors"] for part in parts[:2]] == [part["tensors"] for part in parts[2:]]
    assert parts[0]["tensors"] == parts[1]["others"]

    damaged = rewound(tmp_path / "two", tmp_path / "damaged", "e0000s00003")
    (damaged / "checkpoints/e0000s00003/rank3.pt").write_bytes(b"nothing")
    with pytest.raises(UsageError, match=r"rank3.pt is not the file that was written.*needed because 2 ranks"):
        train_in(damaged, STACK, QUICK, size=2, local_size=2)


def test_settings_of_the_levels() -> None:
    asked: list[Any] = []

    def connect(**options: Any) -> Any:
        asked.append(options["hierarchical"])

    for word in ("auto", "on", "off"):
        settings = load(STACK, [f"--configs.train.hierarchical={word}"]).train
        open_transport(settings, build_method(settings), connect)
    assert asked == ["auto", True, False]
