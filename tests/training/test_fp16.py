"""train.precision fp16: the loss scale in steps, on overflow and in checkpoints. The CPU stands in for a GPU."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from simulated import assert_same_end, rewound, saved, summary_of, train_in

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DenseCompressor
from dgc.optim import DistributedOptimizer
from dgc_training import stepping
from dgc_training.tasks.language_model import LanguageModel
from dgc_training.tasks.protocol import Loss

GPT = "configs/pysource/gpt.py"
SETTINGS = "train.precision=fp16 train.num_epochs=2 train.batch_size=4 train.checkpoint_every=2".split()
SETTINGS += "train.check_replicas_every=1 train.scheduler.warmup_steps=2 data.num_threads_per_worker=1".split()
SETTINGS += "dataset.characters=20000 dataset.vocabulary_size=64 task.context=8 task.steps_per_epoch=5".split()
SETTINGS += ["model.width=16", "model.heads=2"]
FIRST_SCALE = 65536.0

pytestmark = pytest.mark.usefixtures("no_type_checks")


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "FP16_DEVICES", ("cuda", "cpu"))


@pytest.mark.parametrize("words", [[], ["train.clip_norm=null"]])
def test_an_overflow_on_one_rank_drops_the_step_on_all_and_halves_the_scale(
    words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas are compared after each step."""
    calls, dtypes, loss_of = 0, set(), LanguageModel.loss

    def loss(self: Any, model: Any, batch: Any) -> Loss:
        nonlocal calls
        calls += 1
        found = loss_of(self, model, batch)
        dtypes.add(found.outputs.dtype if found.outputs is not None else None)
        # ranks take turns: the sixth call is one rank's third step
        return found._replace(mean=found.mean * 1e36) if calls == 6 else found

    monkeypatch.setattr(LanguageModel, "loss", loss)
    train_in(tmp_path, [GPT], [*SETTINGS, *words])
    assert (calls, dtypes) == (20, {torch.float16})
    assert saved(tmp_path)["shared"]["scaler"]["scale"] == FIRST_SCALE / 2
    assert summary_of(tmp_path)["dropped_steps"] == 1


@pytest.mark.parametrize("stack", [(), ("configs/adam/dgc.py",), ("configs/powersgd/rank2.py",)])
def test_a_resumed_run_has_its_scale_and_ends_bit_identical(
    stack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first scale is far too large: every step lowers it, before and after the interruption."""
    monkeypatch.setattr(stepping, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**40))
    train_in(tmp_path / "whole", [GPT, *stack], SETTINGS)
    again = rewound(tmp_path / "whole", tmp_path / "again", "e0001s00002")
    assert FIRST_SCALE < saved(again)["shared"]["scaler"]["scale"] < 2.0**40
    train_in(again, [GPT, *stack], SETTINGS)
    assert_same_end(tmp_path / "whole", again)
    end = saved(again)["shared"]
    assert end["scaler"]["scale"] <= 2.0**36 and end["progress"]["dropped_steps"] > 3


def test_gradients_are_clipped_after_they_are_unscaled() -> None:
    settings = OmegaConf.create({"precision": "fp16", "clip_norm": 0.01, "gossip": None, "local": None})
    device, model = torch.device("cpu"), torch.nn.Linear(3, 1)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = stepping.make_scaler(settings, device)
    sgd, options = torch.optim.SGD(model.parameters(), lr=1.0), {"transport": LockstepWorld(1).transports[0]}
    optimizer = DistributedOptimizer(
        sgd, model.named_parameters(), DenseCompressor(), grad_scaler=scaler, **options
    )
    steps = stepping.Stepping(optimizer, model, settings, device, scaler)
    with steps.autocast():
        loss = 0.1 * model(torch.ones(2, 3)).float().mean()
    steps.backward(loss)
    steps.step()
    moved = torch.cat([(p.detach() - old).flatten() for p, old in zip(model.parameters(), before, strict=True)])
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)


def test_a_run_without_it_has_no_scale(tmp_path: Path) -> None:
    train_in(tmp_path, [GPT], [*SETTINGS, "train.precision=bf16", "train.num_epochs=1"], size=1)
    assert "scaler" not in saved(tmp_path)["shared"]
