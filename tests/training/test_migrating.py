"""Config files of the original DGC code, after the edits of docs/migrating.md, and those of earlier versions."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import case
from documented import DOCS, table
from pytest import MonkeyPatch
from simulated import CNN, summary_of, train_in
from small_data import write_cifar

import dgc.aggregate
import dgc.gossip
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DenseCompressor
from dgc.memory import DGCSGDMemory
from dgc_training.config import ConfigError, instantiate, load, to_yaml
from dgc_training.earlier import converted
from dgc_training.faults.failure import UsageError
from dgc_training.startup.run_directory import check_run_directory

ENGINE = "from torchpack.mtpack.utils.config import Config, configs\n"
FILES = {
    "__init__.py": """
import torch
from torchpack.mtpack.meters import TopKClassMeter
from dgc.horovod.compression import Compression
configs.seed = 7
configs.data = Config()
configs.data.num_threads_per_worker = 1
configs.train = Config()
configs.train.dgc = False
configs.train.compression = Compression.none
configs.train.criterion = Config(torch.nn.CrossEntropyLoss)
configs.train.optimizer = Config(torch.optim.SGD)
configs.train.optimizer.momentum = 0.8
configs.train.warmup_lr_epochs = 1
configs.train.metric = "hits/test_1"
configs.train.meters = Config()
for k in (1, 3):
    configs.train.meters["hits/{}_%d" % k] = Config(TopKClassMeter)
    configs.train.meters["hits/{}_%d" % k].k = k
""",
    "images/__init__.py": """
import torch
from torchpack.mtpack.datasets.vision import CIFAR
configs.dataset = Config(CIFAR)
configs.dataset.root = "data"
configs.dataset.num_classes = 10
configs.dataset.image_size = 32
configs.train.num_epochs = 3
configs.train.batch_size = 5
configs.train.optimizer.lr = 0.05
configs.train.scheduler = Config(torch.optim.lr_scheduler.MultiStepLR)
configs.train.scheduler.milestones = [at - configs.train.warmup_lr_epochs for at in [2, 3]]
""",
    "images/small.py": """
from torchpack.mtpack.models.vision.resnet import resnet20
configs.model = Config(resnet20)
configs.model.num_classes = configs.dataset.num_classes
""",
    "images/nesterov.py": "configs.train.optimizer.nesterov = True\n",
    "dgc/__init__.py": """
from dgc.compression import DGCCompressor
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD
configs.train.dgc = True
configs.train.compression = Config(DGCCompressor)
configs.train.compression.compress_ratio = 0.01
before = configs.train.optimizer
configs.train.optimizer = Config(DGCSGD)
for name, value in before.items():
    configs.train.optimizer[name] = value
configs.train.compression.memory = Config(DGCSGDMemory)
configs.train.compression.memory.momentum = configs.train.optimizer.momentum
""",
    "dgc/dense_first.py": "configs.train.compression.update(warmup_epochs=1, warmup_coeff=[1])\n",
    "dgc/half.py": "configs.train.compression.fp16_values = True\n",
}
SGP, DILOCO, ZERO_ONE = "configs/gossip/sgp.py", "configs/local/diloco.py", "configs/adam/zero_one_adam.py"
STACKS = [
    [DILOCO], [SGP, "configs/local/slowmo.py"], [SGP, "configs/gossip/machines.py", "configs/local/pga.py"],
    [DILOCO, "configs/local/machines.py"], ["configs/local/sparseloco.py", "configs/local/ramp.py"], [ZERO_ONE],
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """The working directory of a user who made the edits."""
    rows = table("there | here | where", "migrating.md")
    edits = [[re.findall("`(.+?)`", cell) for cell in row[:2]] for row in rows]
    for name, text in FILES.items():
        text = ENGINE + text
        for there, here in edits:
            text = text.replace(there[0], "\n".join(here))
        file = tmp_path / "configs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    everything = ENGINE + "".join(FILES.values())
    assert len(edits) == 7 and all(there[0] in everything for there, _ in edits)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("no_type_checks")
def test_files_in_the_original_form_load_and_train(place: Path) -> None:
    plain = load(["configs/images/small.py"])
    assert plain.train.optimizer._target_ == "torch.optim.SGD" and plain.train.optimizer.momentum == 0.8
    assert type(instantiate(plain.train.compression)) is DenseCompressor
    assert list(plain.train.meters) == ["hits/{}_1", "hits/{}_3"]
    assert plain.train.scheduler.milestones == [1, 2] and plain.model.num_classes == 10
    # what `configs.train = Config()` left out has the shipped root base's value
    assert plain.train.bucket_mb == 25.0 and plain.train.gossip is None and plain.data.num_workers == 0
    for extra in ([], ["configs/images/nesterov.py"]):
        train = load(["configs/images/small.py", *extra, "configs/dgc/dense_first.py", "configs/dgc/half"]).train
        assert train.optimizer._target_ == "dgc.optim.DGCSGD"
        assert train.optimizer.lr == 0.05 and train.optimizer.momentum == 0.8
        memory = instantiate(train.compression).memory
        assert train.compression._target_ == "dgc.compression.DGCCompressor" and isinstance(memory, DGCSGDMemory)
        assert memory.correction.momentum == 0.8 and memory.correction.nesterov == bool(extra)
    write_cifar(place / "data")
    stack = ["configs/images/small.py", "configs/images/nesterov.py", "configs/dgc/dense_first.py"]
    train_in(place / "run", stack, ["train.num_epochs=2"])
    summary = summary_of(place / "run")
    assert 0 < summary["wire_over_dense"] < 1 / 1.5 and "hits/test_3" in summary["final"]
    with (place / "configs/__init__.py").open("a") as file:
        file.write("del configs.deterministic\n")
    with pytest.raises(ConfigError, match=r"configs/__init__\.py: removes deterministic"):
        load(["configs/images/small.py"])


def test_replacement_names_exist() -> None:
    rows = table("there | here | what differs, and why |\n|---|---|---|\n| `GossipDataParallel", "migrating.md")
    here = re.findall("`([A-Za-z_]+)(?:`|\\()", " ".join(row[1] for row in rows))
    names = {name for name in here if name not in ("LocalOptimizer", "graph_from_epoch")}
    assert len(names) >= 12 and not [name for name in names if not hasattr(dgc.gossip, name)]
    (line,) = re.findall("    from dgc.aggregate import (.+)", (DOCS / "migrating.md").read_text())
    assert not [name for name in line.split(", ") if not hasattr(dgc.aggregate, name)]


def earlier(saved: str) -> dict[str, Any]:
    """The config that the version before saved for the same stack of files."""
    content: dict[str, Any] = yaml.safe_load(saved.replace("dgc.local.", "dgc.outer."))
    train, requires = content["train"], content["requires"]
    top = steps = train.pop("local")
    while "HierarchicalGossip" in steps["_target_"]:
        steps = steps["base"]
    if "base" in steps:
        assert steps["base"] == "${train.gossip}"
        steps["base"] = train["gossip"]
    train["gossip"] = top
    if "train.gossip" in requires:
        del requires["train.gossip"]
        requires["train.gossip._target_"] = requires.pop("train.local._target_")
    return content


def test_a_saved_config_is_that_of_the_present_files(tmp_path: Path) -> None:
    for stack in STACKS:
        tree = load([CNN, *stack])
        old = earlier(to_yaml(tree))
        assert "dgc.outer." in yaml.safe_dump(old) and "local" not in old["train"]
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
        with case(stack):
            assert load([tmp_path / "config.yaml"]) == tree
    # a run directory is resumed
    tree = load([CNN, DILOCO], ["--configs.train.local.average_every", "7"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(earlier(to_yaml(tree))))
    transport = LockstepWorld(1).transports[0]
    check_run_directory(tmp_path, tree, transport, "cure")
    with pytest.raises(UsageError, match=r"train.local.average_every: 7 -> 50"):
        check_run_directory(tmp_path, load([CNN, DILOCO]), transport, "cure")


def test_names_of_still_earlier_versions_are_converted_and_other_configs_stay(tmp_path: Path) -> None:
    sgp, slowmo = {"_target_": "dgc.gossip.SGP"}, {"_target_": "dgc.gossip.SlowMo", "beta": 0.5}
    machines = {"_target_": "dgc.gossip.Machines", "base": sgp}
    gossip = {"_target_": "dgc.gossip.Periodic", "average_every": 48, "base": machines, "outer": slowmo}
    derived = {"steps": '${derive:"2 * train.gossip.average_every"}'}
    outer = {"base": "${train.gossip}", "outer": {"_target_": "dgc.local.SlowMo", "beta": 0.5}}
    assert converted({"train": {"gossip": gossip, "scheduler": derived}})["train"] == {
        "gossip": {"_target_": "dgc.gossip.HierarchicalGossip", "base": sgp},
        "local": {"_target_": "dgc.local.OuterSteps", "average_every": 48, **outer},
        "scheduler": {"steps": '${derive:"2 * train.local.average_every"}'},
    }
    # other configs stay, but for csv files, which are a recorder
    saved = tmp_path / "config.yaml"
    stack: list[str]
    for stack in ([], [SGP], [DILOCO]):
        tree = load([CNN, *stack])
        content = yaml.safe_load(to_yaml(tree))
        before = deepcopy(content)
        assert converted(content) == before
        if stack != [DILOCO]:
            del content["train"]["local"]  # a run that was saved before the key
            assert converted(deepcopy(content)) == before
            del content["train"]["recorder"]
            content["train"]["csv"] = stack == [SGP]
            saved.write_text(yaml.safe_dump(content))
            assert load([saved]) == tree and bool(tree.train.recorder) == (stack == [SGP])
    assert converted({"train": 3}) == {"train": 3} and converted({}) == {}


def test_the_command_line_names_the_present_key() -> None:
    for stack in ([DILOCO], [SGP, DILOCO], [ZERO_ONE]):
        key = "local_step_clipper" if stack == [ZERO_ONE] else "average_every"
        message = f"--configs.train.gossip.{key}: .*write --configs.train.local.{key}"
        with pytest.raises(ConfigError, match=message):
            load([CNN, *stack], [f"--configs.train.gossip.{key}=4"])
    stack = [CNN, SGP, DILOCO]
    assert load(stack, ["--configs.train.gossip.blocking", "true"]).train.gossip.blocking
    with pytest.raises(ConfigError, match="train.gossip._target_ is nosuch.SGP: there is no module"):
        load(stack, ["--configs.train.gossip._target_", "nosuch.SGP"])
    with pytest.raises(ConfigError, match=r"write --configs.train.local.outer.momentum$"):
        load(stack, ["--configs.train.gossip.outer.momentum", "0.5"])
