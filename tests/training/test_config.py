"""Stacks of config files: what they become, also the stacks of the original DGC code.

What they refuse is in test_config_errors.py. Those of the original code have the edits of docs/migrating.md.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from documented import DOCS, table
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ReadonlyConfigError
from pytest import MonkeyPatch
from simulated import CNN, summary_of, train_in
from small_data import write_cifar

import dgc.aggregate
import dgc.gossip
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DenseCompressor
from dgc.memory import DGCSGDMemory
from dgc_training.config import ConfigError, instantiate, load, to_yaml
from dgc_training.config.check import argument, refusal
from dgc_training.config.layers import literal
from dgc_training.config_files import REPOSITORY, config_files
from dgc_training.constructors import import_path, import_target, keywords
from dgc_training.faults.failure import UsageError
from dgc_training.startup.build import parameter_groups
from dgc_training.startup.run_directory import check_run_directory
from scripts.methods import SELECTORS

WM5, SGP, RING = (f"configs/{name}.py" for name in ("dgc/wm5", "gossip/sgp", "topology/ring"))
HEAD = "import torch\nfrom dgc_training.config import Config, configs, derived\n"
SHIPPED = [str(file.relative_to(REPOSITORY)) for file in config_files(REPOSITORY / "configs")]
BEFORE = {  # what stands before a file, or before the files of a folder; otherwise CNN
    "digits": [],
    "selection": [CNN, WM5],
    "topology": [CNN, SGP],
    "wmt16/tokens400k": ["configs/wmt16/base.py"],
    **dict.fromkeys(("gossip/fp16", "gossip/bf16", "gossip/int8"), [CNN, SGP]),
    **dict.fromkeys(("numwords/sgd", "numwords/by_epoch"), ["configs/numwords/tiny.py"]),
    "pysource/sgd": ["configs/pysource/lstm.py"],
    **dict.fromkeys(("pysource/gpt2_small", "pysource/packages"), ["configs/pysource/gpt.py"]),
    "adam/fp16": [CNN, "configs/adam/onebit_adam.py"],
    "contrib/zero_one_adam": [CNN, "configs/adam"],
}
PYTHON = """
configs.train.optimizer = Config(torch.optim.Adam)
configs.train.optimizer.lr = 1e-3
configs.train.optimizer.betas = (0.9, 0.99)
configs.train.criterion = Config(torch.nn.CrossEntropyLoss, label_smoothing=0.1)
configs.train.meters['acc/{}_top3'] = Config('dgc_training.meters.TopKClassMeter', k=3)
configs.train.scheduler.T_max = derived('train.num_epochs * 2')
configs.train.checkpoint_every = 10
"""
YAML = """
train:
  optimizer: {_target_: torch.optim.Adam, lr: 1e-3, betas: [0.9, 0.99]}
  criterion:
    _target_: torch.nn.CrossEntropyLoss
    label_smoothing: 0.1
  meters: {"acc/{}_top3": {_target_: dgc_training.meters.TopKClassMeter, k: 3}}
  scheduler: {T_max: '${derive:"train.num_epochs * 2"}'}
  checkpoint_every: 10
"""


def values(tree: DictConfig) -> Any:
    return OmegaConf.to_container(tree, resolve=True)


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(HEAD + text if name.endswith(".py") else text)
    return file


@pytest.mark.parametrize(
    ("word", "t_max"), [("", 35), ("num_epochs=500", 495), ("warmup_lr_epochs=0", 40), ("num_epochs=2", 1)]
)
def test_derived_values_follow_overrides(word: str, t_max: int) -> None:
    assert load([CNN], [f"--configs.train.{word}"] if word else []).train.scheduler.T_max == t_max


def test_the_memory_follows_the_momentum_of_the_optimizer() -> None:
    words = "--configs.train.optimizer.momentum 0.8 --configs.train.optimizer.nesterov true"
    train = load([CNN, WM5], words.split()).train
    for node in (train.optimizer, train.compression.memory, instantiate(train.compression.memory)):
        assert (node.momentum, node.nesterov) == (0.8, True), node


def test_derived_values_follow_later_files(tmp_path: Path) -> None:
    later = write(tmp_path, "later.yaml", "{train: {num_epochs: 100, optimizer: {momentum: 0.5}}, seed: 7}")
    tree = load([CNN, WM5, later])
    assert tree.train.scheduler.T_max == 95
    assert (tree.train.compression.memory.momentum, tree.train.compression.seed) == (0.5, 7)


def test_the_items_of_a_list_may_be_derived(tmp_path: Path) -> None:
    text = "configs.train.scheduler = Config(torch.optim.lr_scheduler.MultiStepLR)\n"
    text += "configs.train.scheduler.milestones = [derived('train.num_epochs // 2 - train.warmup_lr_epochs'), "
    steps = write(tmp_path, "steps.py", text + "derived('train.num_epochs * 3 // 4'), 39]\n")
    assert list(load([CNN, steps]).train.scheduler.milestones) == [15, 30, 39]
    tree = load([CNN, steps], ["--configs.train.num_epochs=80", "--configs.train.scheduler.milestones.2", "78"])
    assert list(tree.train.scheduler.milestones) == [35, 60, 78]


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("2 + 3 * 4 - 1", 13),
        ("7 / 2", 3.5),
        ("7 // 2 % 2", 1),
        ("-2 ** 2", -4.0),
        ("2 ** -1", 0.5),
        ("min(seed, 3) + max(1, 2.5)", 5.5),
        ("(seed - 40) * +2", 4),
        ("seed / a.b", 14.0),
        ("max(1e1, 2.) + 1_0 ** 2", 110.0),
    ],
)
def test_a_formula_is_arithmetic(formula: str, value: float) -> None:
    tree = OmegaConf.create({"seed": 42, "a": {"b": 3}, "x": f'${{derive:"{formula}"}}'})
    assert tree.x == value and type(tree.x) is type(value)


NO_FORMULAS = (
    "f(1)",
    "a[0]",
    "'a'",
    "a if b else c",
    "lambda: 1",
    "a.b()",
    "max()",
    "a <",
    "True",
    "min(a, key=b)",
)


@pytest.mark.parametrize("formula", [*NO_FORMULAS, "", "1if(2)else(3)", "(1, 2)", "2.5.5", "a b"])
def test_a_formula_of_anything_but_arithmetic_is_refused(formula: str) -> None:
    tree = OmegaConf.create({"x": f'${{derive:"{formula}"}}', "a": 1, "b": 2})
    with pytest.raises(OmegaConfBaseException, match="is not made of keys, numbers"):
        print(tree.x, "is the value of", formula)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_file_builds_its_parts_on_a_stack(name: str) -> None:
    short = name.removeprefix("configs/").removesuffix(".py")
    tree = load([*BEFORE.get(short, BEFORE.get(short.partition("/")[0], [CNN])), name])
    for key in ("compression", "gossip", "criterion"):
        instantiate(tree.train[key])
    with torch.device("meta"):
        model = instantiate(tree.model)
    assert sum(p.numel() for p in model.parameters()) >= 100_000
    groups = parameter_groups(model, False, tree.train.parameter_groups)
    assert isinstance(instantiate(tree.train.optimizer, groups), torch.optim.Optimizer)


def test_dgc_files_set_what_they_say() -> None:
    names = [f"dgc/{name}" for name in "fp16 int32 mm nm wm0 wm5 wm5o".split()]
    assert {f"configs/{name}.py" for name in [*names, *(f"selection/{way}" for way in SELECTORS)]} <= set(SHIPPED)
    dense, dgc = load([CNN]).train, load([CNN, WM5]).train
    assert (dense.dgc, dgc.dgc) == (False, True)
    assert dense.optimizer._target_ == "torch.optim.SGD" and dgc.optimizer._target_ == "dgc.optim.DGCSGD"
    assert {**dense.optimizer, "_target_": 0} == {**dgc.optimizer, "_target_": 0}
    assert dense.compression == {"_target_": "dgc.compression.DenseCompressor"}
    c = load([CNN, WM5, *(f"configs/dgc/{name}.py" for name in ("fp16", "int32", "nm"))]).train.compression
    assert (c.warmup_epochs, c.warmup_coeff, c["values"], c.indices) == (5, None, "fp16", "int32")
    assert c.memory.momentum_masking is False
    assert load([CNN, "configs/dgc/wm0.py"]).train.compression.warmup_epochs == 0
    assert list(load([CNN, "configs/dgc/wm5o"]).train.compression.warmup_coeff) == [1] * 5


def test_bases_apply_once_from_the_top_down_in_any_folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Once per load, before the first file of the folder: a base does not undo an earlier file of it."""
    tree = load([CNN, WM5, "configs/digits/resnet20.py", "configs/dgc/fp16.py"])
    assert tree.train.compression.warmup_epochs == 5 and tree.train.compression["values"] == "fp16"
    assert tree.model._target_ == "dgc_models.resnet20"
    top = "{dataset: {_target_: dgc_datasets.Digits}, seed: 1, deterministic: true}"
    write(tmp_path, "no_base/a/__init__.yaml", top)
    write(tmp_path, "no_base/a/b/__init__.py", "configs.seed = configs.seed + 1")
    write(tmp_path, "no_base/a/b/c.py", "configs.seed *= 10\nconfigs.train.num_epochs = 3")
    model = "{model: {_target_: dgc_models.DigitsCNN}, train: {batch_size: 4, num_epochs: 9}}"
    rest, folder = write(tmp_path, "rest.yaml", model), tmp_path / "no_base/a/b"
    tree = load([folder / "c.py", rest])
    assert (tree.seed, tree.deterministic, tree.train.num_epochs) == (20, True, 9)
    assert load([folder, rest]).seed == 2 and load([folder / "c", folder / "c.py", rest]).seed == 200
    assert load([f"{folder}/", tmp_path / "no_base/a", rest]).seed == 2
    # in any working directory
    expected, mine = load([CNN, WM5]), write(tmp_path, "mine.yml", "seed: 3")
    monkeypatch.chdir(tmp_path)
    assert load([CNN, WM5]) == load([REPOSITORY / CNN, "./configs/dgc/wm5"]) == expected
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("mine.yml", "mine", str(mine), "~/mine"):
        assert load([CNN, name]).seed == 3
    shadow = write(tmp_path, "configs/digits/cnn.py", "configs.seed = 4")
    assert load([REPOSITORY / CNN, CNN]).seed == 4, f"{shadow} lies in the working directory and comes first"
    assert os.getcwd() == str(tmp_path)


def test_a_tree_is_read_only() -> None:
    tree = load([CNN])
    with pytest.raises(ReadonlyConfigError):
        tree.seed = 1
    assert list(tree) == ["seed", "deterministic", "data", "dataset", "model", "task", "train", "requires"]


def test_loads_do_not_touch_each_other(tmp_path: Path) -> None:
    first = to_yaml(load([CNN]))
    load([CNN, WM5, "configs/dgc/nm.py"], ["--configs.train.num_epochs", "3"])
    with pytest.raises(ConfigError):
        load([CNN, write(tmp_path, "bad.py", "configs.seed = 1\nraise KeyError('x')")])
    assert to_yaml(load(["configs/digits/resnet20.py"])) != first
    assert to_yaml(load([CNN])) == to_yaml(load([CNN, CNN])) == first


def test_there_is_no_tree_outside_of_a_config_file() -> None:
    with pytest.raises(ImportError, match="configs"):
        from dgc_training.config import configs  # noqa: F401


def test_a_config_file_may_load_another_stack(tmp_path: Path) -> None:
    text = "from dgc_training.config import load\n"
    text += "configs.seed = load(['configs/digits/resnet20.py'], ['--configs.seed', '42']).seed + 1"
    assert load([CNN, write(tmp_path, "x.py", text)]).seed == 43


def test_a_python_file_makes_the_tree_of_a_yaml_file(tmp_path: Path) -> None:
    tree = load([CNN, write(tmp_path, "b.yaml", YAML)])
    assert to_yaml(load([CNN, write(tmp_path, "a.py", PYTHON)])) == to_yaml(tree)
    assert "momentum" not in tree.train.optimizer and len(tree.train.meters) == 3
    assert tree.train.scheduler.T_max == 80


SGD_NODE, ADAM_NODE = ({"_target_": f"torch.optim.{name}", "lr": 0.1} for name in ("SGD", "Adam"))
WITH_SGD, WITH_ADAM = (f"{{_target_: torch.optim.{name}, lr: 0.1}}" for name in ("SGD", "Adam"))


@pytest.mark.parametrize("mapping", [WITH_SGD, "{lr: 0.1}", WITH_ADAM])
def test_a_mapping_merges_unless_it_has_another_constructor(tmp_path: Path, mapping: str) -> None:
    merged = {**values(load([CNN]).train.optimizer), "lr": 0.1}
    file = write(tmp_path, "a.yaml", f"train: {{optimizer: {mapping}}}")
    for tree in (load([CNN, file]), load([CNN], ["--configs.train.optimizer", mapping])):
        assert values(tree.train.optimizer) == (ADAM_NODE if mapping == WITH_ADAM else merged)


def test_an_assigned_config_replaces_the_node(tmp_path: Path) -> None:
    file = write(tmp_path, "c.py", "configs.train.optimizer = Config(torch.optim.SGD, lr=0.1)")
    words = ["--configs.train.optimizer", "null", "--configs.train.optimizer", WITH_SGD]
    assert values(load([CNN, file]).train.optimizer) == values(load([CNN], words).train.optimizer) == SGD_NODE


def test_a_mapping_merges_in_its_inner_nodes_too() -> None:
    memory = "{_target_: dgc.memory.DGCSGDMemory, momentum: 0.5}"
    mapping = f"{{_target_: dgc.compression.DGCCompressor, memory: {memory}}}"
    expected = values(load([CNN, WM5]).train.compression)
    expected["memory"]["momentum"] = 0.5
    assert values(load([CNN, WM5], ["--configs.train.compression", mapping]).train.compression) == expected


def test_a_mapping_merges_in_the_item_of_a_list() -> None:
    route = [CNN, "configs/powersgd/rank2.py", "configs/route/matrices_only.py"]
    tree = load(route, ["--configs.train.compression.rules.0.compressor", "{rank: 3}"])
    before = values(load(route).train.compression.rules[0].compressor)
    assert values(tree.train.compression.rules[0].compressor) == {**before, "rank": 3}


@pytest.fixture(params=["experiment", "DGC", "less than its base"])
def saved_tree(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A tree, and the file in which it was saved with its formulas. The last stack takes keys of its base away."""
    text = "configs.train.meters = Config()\nconfigs.train.metric = None\n"
    own = write(tmp_path, "own.py", text + "configs.train.optimizer = Config(torch.optim.SGD, lr=0.1)")
    stacks: dict[str, list[str | Path]] = {
        "experiment": [CNN],
        "DGC": [CNN, WM5, "configs/dgc/fp16.py"],
        "less than its base": [CNN, own],
    }
    words = ["--configs.train.optimizer.lr", "1e-5", "--configs.train.scheduler.eta_min", "0"]
    tree = load(stacks[request.param], words)
    return tree, write(tmp_path, "runs/name/config.yaml", to_yaml(tree, resolve=False))


def test_a_saved_tree_repeats_the_run(saved_tree: tuple[Any, Path]) -> None:
    tree, saved = saved_tree
    assert load([saved]) == tree and to_yaml(load([saved])) == to_yaml(tree)
    saved.write_text(to_yaml(tree, resolve=True))
    assert values(load([saved])) == values(tree)


def test_a_saved_tree_can_be_overridden(saved_tree: tuple[Any, Path]) -> None:
    tree, saved = saved_tree
    again = load([saved], ["--configs.train.num_epochs", "500", "--configs.train.optimizer.momentum", "0.8"])
    assert again.train.scheduler.T_max == 495
    assert "memory" not in tree.train.compression or again.train.compression.memory.momentum == 0.8


def test_a_saved_tree_brings_the_keys_that_its_stack_declared(tmp_path: Path) -> None:
    write(tmp_path, "own/__init__.yaml", "mine: {depth: 3}")
    tree = load([CNN, write(tmp_path, "own/deep.yaml", "mine: {depth: 4}")])
    saved = write(tmp_path, "config.yaml", to_yaml(tree))
    assert load([saved]) == tree and load([saved], ["--configs.mine.depth", "5"]).mine.depth == 5


def test_a_saved_tree_can_be_stacked_under_dgc(tmp_path: Path) -> None:
    saved = write(tmp_path, "config.yaml", to_yaml(load([CNN], ["--configs.seed", "9"])))
    assert load([saved, WM5]) == load([CNN, WM5], ["--configs.seed", "9"])


LITERALS: dict[str, Any] = {
    **{"500": 500, "-3": -3, "1e-4": 1e-4, "-.5": -0.5, "1_000": 1000},
    **{"null": None, "None": None, "~": None, "true": True, "False": False},
    **{"[1e-4, null, true, 'a b', -1, c]": [1e-4, None, True, "a b", -1, "c"], "[]": []},
    **{"{b: null, c: 'null of it', d: [x]}": {"b": None, "c": "null of it", "d": ["x"]}},
    **{'"5"': "5", "'null'": "null", "''": ""},
}
TEXTS = ["010", "nan", "resnet20", "1-2", "__import__('os').getcwd()", "acc/test_top1", "conv\\d+[.]a"]


@pytest.mark.parametrize(("text", "value"), [*LITERALS.items(), *((text, text) for text in TEXTS)])
def test_a_literal_has_the_value_that_it_shows(text: str, value: Any) -> None:
    found = literal(text, "key")
    assert found == value and type(found) is type(value)


def test_overrides_of_every_type_are_taken() -> None:
    words = "--configs.train.num_epochs=1e2 --configs.train.optimizer.lr 1e-4 --configs.deterministic True"
    words += " --configs.train.meters.acc/{}_top1.k 3 --configs.train.metric=null --configs.train.bucket_mb 1"
    words += " --configs.train.compression.warmup_coeff [0.5,0.1,0.1,0.1,0.1] --configs.train.checkpoint_every 7"
    words += " --configs.train.optimizer.weight_decay=0 --configs.train.optimizer.dampening -1"
    tree = load([CNN, "configs/dgc/wm5o.py"], words.split())
    train = tree.train
    assert train.num_epochs == 100 and type(train.num_epochs) is int
    assert (train.optimizer.lr, tree.deterministic, train.metric, train.bucket_mb) == (1e-4, True, None, 1)
    assert train.meters["acc/{}_top1"].k == 3 and train.checkpoint_every == 7
    assert list(train.compression.warmup_coeff) == [0.5, 0.1, 0.1, 0.1, 0.1]
    assert (train.optimizer.weight_decay, train.optimizer.dampening) == (0, -1)


def test_null_drops_a_node() -> None:
    assert load([CNN], ["--configs.train.scheduler", "null"]).train.scheduler is None


def test_a_node_replaces_null() -> None:
    clip = "{_target_: dgc.memory.ClipByNorm, max_norm: 2.5}"
    tree = load([CNN, WM5], ["--configs.train.compression.memory.gradient_clipping", clip])
    assert tree.train.compression.memory.gradient_clipping.max_norm == 2.5


@pytest.mark.parametrize(("key", "first"), [("lr", "1"), ("dampening", "0")])
def test_the_last_override_wins(key: str, first: str) -> None:
    """SGD declares floats, whatever int stood there."""
    words = f"--configs.train.optimizer.{key} {first} --configs.train.optimizer.{key} 0.5"
    assert load([CNN], words.split()).train.optimizer[key] == 0.5


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (torch.nn.CrossEntropyLoss, "torch.nn.CrossEntropyLoss"),
        (torch.optim.SGD, "torch.optim.SGD"),
        (torch.optim.lr_scheduler.CosineAnnealingLR, "torch.optim.lr_scheduler.CosineAnnealingLR"),
        (torch.nn.functional.cross_entropy, "torch.nn.functional.cross_entropy"),
        (Path, "pathlib.Path"),
    ],
)
def test_an_import_path_is_the_shortest(target: Any, path: str) -> None:
    assert import_path(target) == path and import_target(path) is target


@pytest.mark.parametrize("nameless", [dict.fromkeys, lambda: 1], ids=["method", "lambda"])
def test_what_has_no_name_has_no_import_path(nameless: Any) -> None:
    with pytest.raises(ValueError):
        import_path(nameless)


def test_keywords_accept_what_their_annotations_say() -> None:
    def accepting(rate: float, name: str | None = None) -> None: ...

    kinds = keywords(accepting)
    assert kinds is not None
    rate, name = argument(kinds["rate"]), argument(kinds["name"])
    assert [bool(refusal(rate, value)) for value in (0.5, 1, "fast", [1])] == [False, False, True, True]
    assert [bool(refusal(name, value)) for value in ("a", None, 0.5)] == [False, False, True]


def test_instantiate_builds_inner_nodes_first() -> None:
    counter = {"_target_": "collections.Counter", "a": 2}
    ordered = {"_target_": "collections.OrderedDict", "k": "${seed}", "inner": counter}
    built = instantiate(OmegaConf.create({"seed": 5, "x": ordered}).x, [("first", 1)], last=3)
    assert list(built.items()) == [("first", 1), ("k", 5), ("inner", {"a": 2}), ("last", 3)]
    assert instantiate(None) is None
    assert instantiate(OmegaConf.create({"m": counter, "n": [counter, 1]})) == {"m": {"a": 2}, "n": [{"a": 2}, 1]}
    # a partial node is called later
    tree = load([CNN, SGP, RING], ["--configs.train.gossip.graph.peers", "1"])
    assert instantiate(tree.train.gossip.graph)(5).out_peers(4, 0) == (0,)
    with pytest.raises(ConfigError, match=r"graph\.peer: dgc\.gossip\.ring takes no keyword 'peer'"):
        load([CNN, SGP, RING], ["--configs.train.gossip.graph.peer", "1"])
    # the node that is wrong is named
    cosine = "torch.optim.lr_scheduler.CosineAnnealingLR"
    train = load([CNN], ["--configs.train.optimizer.lr", "-1", "--configs.train.scheduler._target_", cosine]).train
    with pytest.raises(ConfigError, match=r"train\.optimizer \(torch\.optim\.SGD\): Invalid learning rate: -1"):
        instantiate(train.optimizer, [torch.zeros(1, requires_grad=True)])
    with pytest.raises(ConfigError, match=r"train\.scheduler .*: missing a required argument: 'optimizer'"):
        instantiate(train.scheduler)
    with pytest.raises(ConfigError, match=r"model\.width is set by the program"):
        instantiate(load([CNN]).model, width=3)


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
DILOCO, ZERO_ONE = "configs/local/diloco.py", ["configs/adam", "configs/contrib/zero_one_adam.py"]
STACKS = [
    [DILOCO],
    [SGP, "configs/local/slowmo.py"],
    [SGP, "configs/gossip/machines.py", "configs/local/pga.py"],
    [DILOCO, "configs/local/machines.py"],
    ["configs/local/sparseloco.py", "configs/local/ramp.py"],
    ZERO_ONE,
]


@pytest.fixture
def original_files(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
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


@pytest.mark.usefixtures("original_files")
def test_files_in_the_original_form_load() -> None:
    plain = load(["configs/images/small.py"])
    assert plain.train.optimizer._target_ == "torch.optim.SGD" and plain.train.optimizer.momentum == 0.8
    assert type(instantiate(plain.train.compression)) is DenseCompressor
    assert list(plain.train.meters) == ["hits/{}_1", "hits/{}_3"]
    assert plain.train.scheduler.milestones == [1, 2] and plain.model.num_classes == 10
    # what `configs.train = Config()` left out has the shipped root base's value
    assert plain.train.bucket_mb is None and plain.train.gossip is None and plain.data.num_workers == 0


@pytest.mark.usefixtures("original_files")
@pytest.mark.parametrize("extra", [[], ["configs/images/nesterov.py"]], ids=["momentum", "nesterov"])
def test_files_of_dgc_in_the_original_form_load(extra: list[str]) -> None:
    train = load(["configs/images/small.py", *extra, "configs/dgc/dense_first.py", "configs/dgc/half"]).train
    assert train.optimizer._target_ == "dgc.optim.DGCSGD"
    assert train.optimizer.lr == 0.05 and train.optimizer.momentum == 0.8
    memory = instantiate(train.compression).memory
    assert train.compression._target_ == "dgc.compression.DGCCompressor" and isinstance(memory, DGCSGDMemory)
    assert memory.correction.momentum == 0.8 and memory.correction.nesterov == bool(extra)


@pytest.mark.usefixtures("no_type_checks")
def test_files_in_the_original_form_train(original_files: Path) -> None:
    write_cifar(original_files / "data")
    stack = ["configs/images/small.py", "configs/images/nesterov.py", "configs/dgc/dense_first.py"]
    train_in(original_files / "run", stack, ["train.num_epochs=2"])
    summary = summary_of(original_files / "run")
    assert 0 < summary["wire_over_dense"] < 1 / 1.5 and "hits/test_3" in summary["final"]


def test_a_base_that_removes_a_key_is_refused(original_files: Path) -> None:
    with (original_files / "configs/__init__.py").open("a") as opened:
        opened.write("del configs.deterministic\n")
    with pytest.raises(ConfigError, match=r"configs/__init__\.py: removes deterministic"):
        load(["configs/images/small.py"])


def test_a_saved_config_is_that_of_the_present_files(tmp_path: Path) -> None:
    for stack in STACKS:
        tree = load([CNN, *stack])
        (tmp_path / "config.yaml").write_text(to_yaml(tree))
        assert load([tmp_path / "config.yaml"]) == tree, stack


def test_a_run_directory_with_another_setting_is_refused(tmp_path: Path) -> None:
    tree = load([CNN, DILOCO], ["--configs.train.local.average_every", "7"])
    (tmp_path / "config.yaml").write_text(to_yaml(tree))
    transport = LockstepWorld(1).transports[0]
    check_run_directory(tmp_path, tree, transport, "cure")
    with pytest.raises(UsageError, match=r"train.local.average_every: 7 -> 50"):
        check_run_directory(tmp_path, load([CNN, DILOCO]), transport, "cure")


def test_the_page_names_classes_of_gossip_that_exist() -> None:
    rows = table("there | here | what differs, and why |\n|---|---|---|\n| `GossipDataParallel", "migrating.md")
    here = re.findall("`([A-Za-z_]+)(?:`|\\()", " ".join(row[1] for row in rows))
    names = {name for name in here if name not in ("LocalOptimizer", "graph_from_epoch")}
    assert len(names) >= 12 and not [name for name in names if not hasattr(dgc.gossip, name)]


def test_the_page_imports_names_of_aggregate_that_exist() -> None:
    (line,) = re.findall("    from dgc.aggregate import (.+)", (DOCS / "migrating.md").read_text())
    assert not [name for name in line.split(", ") if not hasattr(dgc.aggregate, name)]


def test_the_command_line_sets_gossip_under_local_steps() -> None:
    stack = [CNN, SGP, DILOCO]
    assert load(stack, ["--configs.train.gossip.blocking", "true"]).train.gossip.blocking
    with pytest.raises(ConfigError, match="train.gossip._target_ is nosuch.SGP: there is no module"):
        load(stack, ["--configs.train.gossip._target_", "nosuch.SGP"])
