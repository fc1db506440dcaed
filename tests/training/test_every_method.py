"""Every config file that names a method or a graph trains: a few steps on digits, on simulated ranks."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated import CNN, rewound, saved, summary_of, train_in

from dgc_training.config import instantiate, load, to_yaml
from dgc_training.faults.failure import UsageError
from dgc_training.startup.agreement import config_differences
from dgc_training.startup.build import build_method, open_transport

CONFIGS = Path(__file__).parents[2] / "configs"
SETTINGS = "train.num_epochs=1 train.batch_size=180 train.warmup_lr_epochs=0 train.checkpoint_every=null".split()
SETTINGS += ["data.num_threads_per_worker=1", "model.width=8"]
BEFORE = {
    "threshold/server": ["configs/threshold/2bit.py"],
    "route/matrices_only": ["configs/quant/qsgd.py"],
    "dgc/reduce_scatter": ["configs/dgc/wm0.py", "configs/dgc/int32.py"],
    "dgc/gtopk": ["configs/dgc/wm0.py", "configs/dgc/int32.py"],
    "adam/fp16": ["configs/adam/zero_one_adam.py"],
}
ZERO_ONE = ["train.local.var_freeze_step=2", "train.check_replicas_every=0"]
# the small model is less than one chunk of the default size, and an epoch has four steps
ALSO = {
    "adam/onebit_adam": ["train.optimizer.freeze_step=2"],
    "adam/zero_one_adam": ZERO_ONE,
    "adam/fp16": ZERO_ONE,
    "adam/dgc_adam": ["train.optimizer.freeze_step=2"],
    "adam/dgc": ["train.compression.warmup_epochs=0"],
}


def names(folder: str) -> list[str]:
    """The files that extend a stack, without those of which every stack has one."""
    files = sorted((CONFIGS / folder).glob("*.py"))
    return [f"{folder}/{path.stem}" for path in files if path.stem not in ("__init__", "streaming")]


FOLDERS = ("chunks", "powersgd", "threshold", "quant", "sparse", "adam", "route")
COMPRESSION = [name for folder in FOLDERS for name in names(folder)] + ["dgc/reduce_scatter", "dgc/gtopk"]
GOSSIP = [
    *(["gossip/" + name] for name in ("ar", "sgp", "osgp", "dpsgd", "choco", "powergossip")),
    *(["gossip/sgp", "gossip/" + name] for name in ("fp16", "bf16", "int8", "machines")),
    *(["gossip/osgp", name] for name in names("local")),
    ["gossip/sgp", "topology/hierarchical"],
    ["local/slowmo"],
]
pytestmark = pytest.mark.usefixtures("no_type_checks")


@pytest.mark.parametrize("name", COMPRESSION)
def test_compression_trains_and_sends_less(name: str, tmp_path: Path) -> None:
    also = ["train.compression.chunk_size=200"] if name.startswith("chunks/") else ALSO.get(name, [])
    stack = [CNN, *BEFORE.get(name, []), f"configs/{name}.py"]
    train_in(tmp_path, stack, [*SETTINGS, "train.check_replicas_every=1", *also])
    summary = summary_of(tmp_path)
    assert 0 < summary["wire_over_dense"] < 1.0 and math.isfinite(summary["best"]["acc/test_top1"])


@pytest.mark.parametrize("names", GOSSIP, ids="+".join)
def test_gossip_trains(names: Any, tmp_path: Path) -> None:
    also = ["train.batch_size=90", "train.log_every=2"]
    also += ["train.gossip.graph.local_size=2"] if "topology/hierarchical" in names else []
    train_in(tmp_path, [CNN, *(f"configs/{name}.py" for name in names)], [*SETTINGS, *also], size=4)
    summary = summary_of(tmp_path)
    assert summary["dropped_steps"] == 0 and math.isfinite(summary["best"]["acc/test_top1"])


@pytest.mark.parametrize("name", names("topology"))
def test_every_graph_takes_the_number_of_ranks(name: str) -> None:
    words = ["--configs.train.gossip.graph.local_size=2"] if name == "topology/hierarchical" else []
    gossip = load([CNN, "configs/gossip/sgp.py", f"configs/{name}.py"], words).train.gossip
    for graph in (gossip.graph, *(gossip.graph_from_epoch or {}).values()):
        assert graph is None or instantiate(graph)(4).size == 4


# Adam

ADAM, ONEBIT_ADAM, GPT = "configs/adam", "configs/adam/onebit_adam.py", "configs/pysource/gpt.py"


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
    # another freeze_step is another run
    trees = [load([CNN, ONEBIT_ADAM], [f"--configs.train.optimizer.freeze_step={step}"]) for step in (6, 5)]
    assert config_differences(*map(to_yaml, trees)) == ["  train.optimizer.freeze_step: 6 -> 5"]


def test_an_experiment_with_adam_keeps_its_settings() -> None:
    expected = dict(load([GPT]).train.optimizer)
    assert dict(load([GPT, ADAM]).train.optimizer) == expected
    found = dict(load([GPT, "configs/adam/dgc_adam.py"]).train.optimizer)
    assert found == {**expected, "_target_": "dgc.optim.DGCAdam", "freeze_step": 100}
    for more in ([], *([f"configs/quant/{name}.py"] for name in ("scaled_sign", "onebit", "qsgd"))):
        assert load([CNN, ADAM, *more]).train.optimizer._target_ == "torch.optim.AdamW"


# Machines of several ranks


def test_auto_is_on_with_several_machines_of_several_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack, quick = [CNN, "configs/dgc/wm0.py"], [*SETTINGS, "train.check_replicas_every=1", "model.width=4"]
    quick += ["train.batch_size=64", "train.checkpoint_every=3"]
    train_in(tmp_path / "two", stack, quick, size=4, local_size=2)
    assert "gradients are compressed between 2 machines, and dense inside them" in capsys.readouterr().out
    train_in(tmp_path / "one", stack, quick, size=2, local_size=2)
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
        train_in(damaged, stack, quick, size=2, local_size=2)

    asked: list[Any] = []

    def connect(**options: Any) -> Any:
        asked.append(options["hierarchical"])

    for word in ("auto", "on", "off"):
        settings = load(stack, [f"--configs.train.hierarchical={word}"]).train
        open_transport(settings, build_method(settings), connect)
    assert asked == ["auto", True, False]
