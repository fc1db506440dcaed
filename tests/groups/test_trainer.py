"""Groups of train.py, by configs/local/groups.py."""

from pathlib import Path
from typing import Any

import pytest
from groups.sites import post
from simulated import CNN, summary_of, train_in

from dgc.groups.steps import GroupSteps
from dgc_training.config import ConfigError, load
from dgc_training.startup.setup import require_complete

FILES = ["configs/local/diloco.py", "configs/local/groups.py"]
QUICK = ["model.width=4", "train.batch_size=300", "train.num_epochs=1", "data.num_threads_per_worker=1"]


def train(
    directory: Path,
    led: Any,
    *files: str,
    size: int = 1,
    steps: str = "train.local.average_every=2",
    weighted: bool = False,
) -> int:
    """Train a group to the end. Returns the last round."""
    settings = [
        f"train.groups.weighted={weighted}",
        *QUICK,
        steps,
        f"train.groups.address={led.address}",
        f"train.groups.folder={directory}/state",
    ]
    train_in(directory, [CNN, *files], settings, size)
    assert summary_of(directory)["epochs"] == 1
    return int(led.round)


def test_a_group_trains_to_the_end_and_the_next_one_goes_on_with_its_state(tmp_path: Path) -> None:
    with post(tmp_path, quorum=1, grace=0.0) as led:
        rounds = train(tmp_path / "a", led, *FILES)
        assert rounds > 0 and (tmp_path / "a/state/rank0.pt").exists()
        (tmp_path / "a/state").rename(tmp_path / "state")
        (tmp_path / "b").mkdir()
        (tmp_path / "state").rename(tmp_path / "b/state")
        assert train(tmp_path / "b", led, *FILES) == 2 * rounds


def test_a_group_of_several_ranks_averages_its_gradients(tmp_path: Path) -> None:
    with post(tmp_path, quorum=1, grace=0.0) as led:
        files = [FILES[0], "configs/local/machines.py", FILES[1]]
        assert train(tmp_path, led, *files, size=2, steps="train.local.base.average_every=1") > 0


def test_the_trainer_counts_samples_for_groups_that_are_weighted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, count = list[int](), GroupSteps.count

    def counting(steps: GroupSteps, items: int) -> None:
        counted.append(items)
        count(steps, items)

    monkeypatch.setattr(GroupSteps, "count", counting)
    with post(tmp_path, quorum=1, grace=0.0) as led:
        rounds = train(tmp_path, led, *FILES, weighted=True)
    assert counted[:4] == [300] * 4 and rounds == len(counted) // 2


def test_groups_without_outer_steps_are_refused() -> None:
    tree = load([CNN], ["--configs.train.groups", "{_target_: dgc.groups.connect, address: a}"])
    with pytest.raises(ConfigError, match="stack a file of configs/local"):
        require_complete(tree, "cpu")
