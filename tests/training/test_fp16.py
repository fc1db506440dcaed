"""train.precision fp16: the loss scale in steps, on overflow and in checkpoints. The CPU stands in for a GPU."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import train
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DenseCompressor
from dgc.optim import DistributedOptimizer
from dgc_training import stepping
from dgc_training.checkpoint.reading import read_tensors
from dgc_training.config import ConfigError, load
from dgc_training.startup.arguments import parse_arguments
from dgc_training.tasks.language_model import LanguageModel
from dgc_training.tasks.protocol import Loss

SETTINGS = [
    "train.precision=fp16",
    "train.num_epochs=2",
    "train.batch_size=4",
    "train.checkpoint_every=2",
    "train.check_replicas_every=1",
    "data.num_threads_per_worker=1",
    "dataset.characters=20000",
    "dataset.vocabulary_size=64",
    "task.context=8",
    "task.steps_per_epoch=5",
    "model.width=16",
    "model.heads=2",
    "train.scheduler.warmup_steps=2",
]
FIRST_SCALE = 65536.0

pytestmark = pytest.mark.usefixtures("no_type_checks")


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "FP16_DEVICES", ("cuda", "cpu"))


def run(directory: Path, size: int = 2, stack: Any = (), words: Any = ()) -> None:
    changes = [f"--configs.{word}" for word in [*SETTINGS, *words]]
    argv = ["--configs", "configs/pysource/gpt.py", *stack, "--run-dir", str(directory), "--devices", "cpu"]
    args, overrides = parse_arguments([*argv, *changes])
    tree = load(args.configs, overrides)
    LockstepWorld(size).run(partial(train.run, args, tree))


def saved(directory: Path, name: str = "e0002") -> Any:
    return read_tensors(directory / "checkpoints" / name / "shared.pt")


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
    run(tmp_path / "run", words=words)
    assert (calls, dtypes) == (20, {torch.float16})
    assert saved(tmp_path / "run")["scaler"]["scale"] == FIRST_SCALE / 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["dropped_steps"] == 1


@pytest.mark.parametrize("stack", [(), ("configs/adam/dgc.py",), ("configs/powersgd/rank2.py",)])
def test_a_resumed_run_has_its_scale_and_ends_bit_identical(
    stack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first scale is far too large: every step lowers it, before and after the interruption."""
    monkeypatch.setattr(stepping, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**40))
    run(tmp_path / "whole", stack=stack)
    stop, steps = train.is_due, 0

    def fail(every: Any, step: Any) -> bool:
        nonlocal steps
        steps += 1
        if steps > 2 * 6:  # after the third step: each of 2 ranks asks twice a step
            raise RuntimeError("killed")
        return stop(every, step)

    with monkeypatch.context() as patched:
        patched.setattr(train, "is_due", fail)
        with pytest.raises(RuntimeError, match="killed"):
            run(tmp_path / "cut", stack=stack)
    run(tmp_path / "cut", stack=stack)
    whole, cut = saved(tmp_path / "whole"), saved(tmp_path / "cut")
    assert whole["scaler"] == cut["scaler"] and whole["scaler"]["scale"] <= 2.0**36
    assert whole["progress"]["dropped_steps"] == cut["progress"]["dropped_steps"] > 3
    leaves = [torch.utils._pytree.tree_leaves(part["model"]) for part in (whole, cut)]
    assert all(torch.equal(a, b) for a, b in zip(*leaves, strict=True))


def test_gradients_are_clipped_after_they_are_unscaled() -> None:
    settings = OmegaConf.create({"precision": "fp16", "clip_norm": 0.01, "gossip": None, "local": None})
    device, model = torch.device("cpu"), torch.nn.Linear(3, 1)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = stepping.make_scaler(settings, device)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        DenseCompressor(),
        transport=LockstepWorld(1).transports[0],
        grad_scaler=scaler,
    )
    steps = stepping.Stepping(optimizer, model, settings, device, scaler)
    with steps.autocast():
        loss = 0.1 * model(torch.ones(2, 3)).float().mean()
    steps.backward(loss)
    steps.step()
    moved = torch.cat([(p.detach() - old).flatten() for p, old in zip(model.parameters(), before, strict=True)])
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)


def test_gossip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="every rank would have a loss scale of its own: use bf16"):
        run(tmp_path / "run", stack=["configs/gossip/sgp.py"], words=["train.check_replicas_every=0"])


def test_a_run_without_it_has_no_scale(tmp_path: Path) -> None:
    run(tmp_path / "run", size=1, words=["train.precision=bf16", "train.num_epochs=1"])
    assert "scaler" not in saved(tmp_path / "run", "e0001")
