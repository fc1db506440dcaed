"""train.py with configs/adam: what is clipped and saved, and which settings a stack has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from simulated import CNN, saved, train_in

from dgc_training.config import load, to_yaml
from dgc_training.startup.agreement import config_differences

ADAM, ONEBIT_ADAM, GPT = "configs/adam", "configs/adam/onebit_adam.py", "configs/pysource/gpt.py"


@pytest.mark.usefixtures("no_type_checks")
def test_momentum_is_not_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12 steps, the gradients of the first 6 are."""
    limits, clip = [], torch.nn.utils.clip_grad_norm_

    def recorded(parameters: Any, limit: float) -> Any:
        limits.append(limit)
        return clip(parameters, limit)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", recorded)
    settings = "num_epochs=1 warmup_lr_epochs=0 batch_size=128 optimizer.freeze_step=6 clip_norm=0.5".split()
    train_in(tmp_path, [CNN, ONEBIT_ADAM], [f"train.{word}" for word in settings], size=1)
    assert limits == [0.5] * 6
    (group,) = saved(tmp_path)["shared"]["optimizer"]["param_groups"]
    assert group["steps"] == 12 and group["freeze_step"] == 6


def test_another_freeze_step_is_another_run() -> None:
    trees = [load([CNN, ONEBIT_ADAM], [f"--configs.train.optimizer.freeze_step={step}"]) for step in (6, 5)]
    assert config_differences(*map(to_yaml, trees)) == ["  train.optimizer.freeze_step: 6 -> 5"]


def test_an_experiment_with_adam_keeps_its_settings() -> None:
    expected = dict(load([GPT]).train.optimizer)
    assert dict(load([GPT, ADAM]).train.optimizer) == expected
    found = dict(load([GPT, "configs/adam/dgc_adam.py"]).train.optimizer)
    assert found == {**expected, "_target_": "dgc.optim.DGCAdam", "freeze_step": 100}
    for more in ([], *([f"configs/quant/{name}.py"] for name in ("scaled_sign", "onebit", "qsgd"))):
        assert load([CNN, ADAM, *more]).train.optimizer._target_ == "torch.optim.AdamW"
