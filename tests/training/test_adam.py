"""train.py with configs/adam: exact resume of 1-bit Adam and 0/1 Adam in their stages, and what does not stack."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from training.test_train import assert_equal, run

from dgc_training.checkpoint.reading import read_tensors
from dgc_training.config import ConfigError, load
from dgc_training.faults.failure import UsageError

pytestmark = pytest.mark.usefixtures("no_type_checks")
STACK = ["--configs", "configs/digits/cnn.py", "configs/adam/onebit_adam.py"]
# an epoch has 12 steps
SHORT = [f"--configs.train.{word}" for word in ("num_epochs=1", "warmup_lr_epochs=0", "checkpoint_every=4")]
FREEZE = "--configs.train.optimizer.freeze_step"


def train_in(directory: Path, *words: str, size: int = 2, freeze_step: int = 6) -> None:
    run(["--run-dir", str(directory), *SHORT, f"{FREEZE}={freeze_step}", *words], size, STACK)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "run"
    train_in(directory)
    return directory


def part(whole: Path, directory: Path, start: str) -> Path:
    """The run as it was after `start`."""
    shutil.copytree(whole, directory / "run")
    checkpoints = directory / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "e0001")
    (checkpoints / "latest.json").write_text(json.dumps({"checkpoint": start}))
    return directory / "run"


@pytest.mark.parametrize("start", ["e0000s00004", "e0000s00008"])
def test_resumed_in_either_stage_it_ends_bit_identical(whole: Any, tmp_path: Path, start: Any) -> None:
    again = part(whole, tmp_path, start)
    train_in(again)
    for file in ("shared.pt", "rank0.pt", "rank1.pt"):
        states = [read_tensors(run / "checkpoints" / "e0001" / file) for run in (whole, again)]
        for state in states:
            state.pop("random", None)  # simulated ranks share it
        assert_equal(*states)
    saved = read_tensors(whole / "checkpoints" / "e0001" / "shared.pt")["optimizer"]["param_groups"][0]
    assert saved["steps"] == 12 and saved["freeze_step"] == 6


def test_resumed_on_another_number_of_ranks(whole: Any, tmp_path: Path) -> None:
    again = part(whole, tmp_path, "e0000s00008")
    with pytest.warns(
        UserWarning, match="saved by 2 ranks and is resumed by 3.*random generators are seeded again"
    ):
        train_in(again, size=3)
    assert math.isfinite(json.loads((again / "summary.json").read_text())["best"]["acc/test_top1"])


def test_momentum_is_not_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12 steps, the gradients of the first 6 are."""
    limits, clip = [], torch.nn.utils.clip_grad_norm_

    def recorded(parameters: Any, limit: float) -> Any:
        limits.append(limit)
        return clip(parameters, limit)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", recorded)
    train_in(tmp_path / "run", "--configs.train.clip_norm=0.5", size=1)
    assert limits == [0.5] * 6


def test_another_freeze_step_is_another_run(whole: Any, tmp_path: Path) -> None:
    again = part(whole, tmp_path, "e0000s00008")
    with pytest.raises(UsageError, match=r"train.optimizer.freeze_step: 6 -> 5"):
        train_in(again, freeze_step=5)


def test_zero_one_adam_resumed_between_two_exchanges_ends_bit_identical(tmp_path: Path) -> None:
    """Step 8 is the third of four local steps."""
    numbers = {"var_freeze_step": 4, "var_update_scaler": 1, "local_step_scaler": 1, "local_step_clipper": 4}
    words = [*SHORT, "--configs.train.check_replicas_every=0"]
    words += [f"--configs.train.local.{name}={number}" for name, number in numbers.items()]
    stack = [*STACK[:2], "configs/adam/zero_one_adam.py"]
    whole, again = tmp_path / "run", tmp_path / "again"
    run(["--run-dir", str(whole), *words], 2, stack)
    again = part(whole, again, "e0000s00008")
    own = [read_tensors(again / "checkpoints" / "e0000s00008" / f"rank{rank}.pt") for rank in range(2)]
    states = [state["compression"]["ZeroOneSteps.0"] for state in own]
    assert states[0]["local_steps"] == 3
    assert any(not torch.equal(z, states[1]["z"][name]) for name, z in states[0]["z"].items())
    run(["--run-dir", str(again), *words], 2, stack)
    for file in ("shared.pt", "rank0.pt", "rank1.pt"):
        ends = [read_tensors(folder / "checkpoints" / "e0001" / file) for folder in (whole, again)]
        for state in ends:
            state.pop("random", None)  # simulated ranks share it
        assert_equal(*ends)


def test_what_does_not_stack() -> None:
    for stack, message in (
        (["configs/adam/zero_one_adam.py", "configs/quant/qsgd.py"], "train.compression._target_"),
        (["configs/adam/zero_one_adam.py", "configs/local/diloco.py"], "train.local._target_"),
        (["configs/dgc/wm0.py", "configs/adam/onebit_adam.py"], "train.dgc"),
        (["configs/adam/dgc.py", "configs/dgc/wm0.py"], "train.optimizer is torch.optim.AdamW"),
        (["configs/adam/onebit_adam.py", "configs/quant/qsgd.py"], "train.compression._target_"),
        (["configs/adam/onebit_adam.py", "configs/adam/dgc.py"], "_target_"),
        (["configs/adam/dgc_adam.py", "configs/quant/qsgd.py"], "train.compression._target_"),
        (["configs/adam/dgc.py", "configs/adam/fp16.py"], "has no steps that send gradients without compression"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(["configs/digits/cnn.py", *stack])
    for name in ("scaled_sign", "onebit", "qsgd"):
        tree = load(["configs/digits/cnn.py", "configs/adam", f"configs/quant/{name}.py"])
        assert tree.train.optimizer._target_ == "torch.optim.AdamW"


def test_an_experiment_with_adam_keeps_its_settings() -> None:
    expected = dict(load(["configs/pysource/gpt.py"]).train.optimizer)
    assert dict(load(["configs/pysource/gpt.py", "configs/adam"]).train.optimizer) == expected
    found = dict(load(["configs/pysource/gpt.py", "configs/adam/dgc_adam.py"]).train.optimizer)
    assert found == {**expected, "_target_": "dgc.optim.DGCAdam", "freeze_step": 100}
    assert load(["configs/digits/cnn.py", "configs/adam"]).train.optimizer._target_ == "torch.optim.AdamW"
