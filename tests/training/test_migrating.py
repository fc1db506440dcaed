"""Config files in the form of the original DGC code work after the edits of docs/migrating.md and nothing else."""

import re
from pathlib import Path

import pytest
from documented import DOCS, table
from simulated import summary_of, train_in
from small_data import write_cifar

import dgc.aggregate
import dgc.gossip
from dgc.compression import DenseCompressor, DGCCompressor
from dgc.memory import DGCSGDMemory
from dgc_training.config import Config, ConfigError, instantiate, load
from dgc_training.config.tree import copied

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
configs.train.compression.sample_ratio = 0.05
configs.train.compression.max_adaptation_iters = 4
before = configs.train.optimizer
configs.train.optimizer = Config(DGCSGD)
for name, value in before.items():
    configs.train.optimizer[name] = value
configs.train.compression.memory = Config(DGCSGDMemory)
configs.train.compression.memory.momentum = configs.train.optimizer.momentum
""",
    "dgc/dense_first.py": """
configs.train.compression.warmup_epochs = 1
configs.train.compression.warmup_coeff = [1]
""",
    "dgc/half.py": "configs.train.compression.fp16_values = True\n",
}


def edits() -> list[tuple[str, str]]:
    rows = table("there | here | where", "migrating.md")
    spans = [[re.findall("`(.+?)`", cell) for cell in row[:2]] for row in rows]
    return [(there[0], "\n".join(here)) for there, here in spans]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user who made the edits."""
    unused = dict(edits())
    for name, text in FILES.items():
        text = ENGINE + text
        for there, here in edits():
            if there in text:
                text = text.replace(there, here)
                unused.pop(there, None)
        file = tmp_path / "configs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert len(edits()) == 7 and not unused
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_items_are_the_keywords_of_the_constructor() -> None:
    node = Config("torch.optim.SGD", lr=1.0, _partial_=True)
    assert dict(node.items()) == {"lr": 1.0} and list(node.keys()) == ["lr"] and list(node.values()) == [1.0]
    for key, value in node.items():
        node[f"{key}2"] = value
    other = Config("dgc.optim.DGCSGD")
    for key, value in node.items():
        other[key] = value
    assert other._target_ == "dgc.optim.DGCSGD" and other.lr2 == 1.0
    # the whole node, as dict.update and a copy take it
    other.update(node)
    copy = copied(node)
    assert other._target_ == copy._target_ == "torch.optim.SGD" and copy._partial_ is True


def test_files_in_the_original_form_load(place: Path) -> None:
    plain = load(["configs/images/small.py"])
    assert plain.train.optimizer._target_ == "torch.optim.SGD" and plain.train.optimizer.momentum == 0.8
    assert type(instantiate(plain.train.compression)) is DenseCompressor
    assert list(plain.train.meters) == ["hits/{}_1", "hits/{}_3"]
    assert plain.train.scheduler.milestones == [1, 2] and plain.model.num_classes == 10
    # what `configs.train = Config()` left out has the shipped root base's value
    assert plain.train.bucket_mb == 25.0 and plain.train.gossip is None and plain.data.num_workers == 0

    for extra in ([], ["configs/images/nesterov.py"]):
        tree = load(["configs/images/small.py", *extra, "configs/dgc/dense_first.py", "configs/dgc/half"])
        assert tree.train.optimizer._target_ == "dgc.optim.DGCSGD"
        assert tree.train.optimizer.lr == 0.05 and tree.train.optimizer.momentum == 0.8
        compression = instantiate(tree.train.compression)
        assert type(compression) is DGCCompressor
        memory = compression.memory
        assert isinstance(memory, DGCSGDMemory) and memory.correction.momentum == 0.8
        assert memory.correction.nesterov == bool(extra)

    with (place / "configs/__init__.py").open("a") as file:
        file.write("del configs.deterministic\n")
    with pytest.raises(ConfigError, match=r"configs/__init__\.py: removes deterministic"):
        load(["configs/images/small.py"])


@pytest.mark.usefixtures("no_type_checks")
def test_files_in_the_original_form_train(place: Path) -> None:
    write_cifar(place / "data")
    stack = ["configs/images/small.py", "configs/images/nesterov.py", "configs/dgc/dense_first.py"]
    train_in(place / "run", stack, ["train.num_epochs=2"])
    summary = summary_of(place / "run")
    assert 0 < summary["wire_over_dense"] < 1 / 1.5 and "hits/test_3" in summary["final"]


def test_replacement_names_exist() -> None:
    rows = table("there | here | what differs, and why |\n|---|---|---|\n| `GossipDataParallel", "migrating.md")
    here = re.findall("`([A-Za-z_]+)(?:`|\\()", " ".join(row[1] for row in rows))
    names = {name for name in here if name not in ("LocalOptimizer", "graph_from_epoch")}
    assert len(names) >= 12 and not [name for name in names if not hasattr(dgc.gossip, name)]
    (line,) = re.findall("    from dgc.aggregate import (.+)", (DOCS / "migrating.md").read_text())
    assert not [name for name in line.split(", ") if not hasattr(dgc.aggregate, name)]
