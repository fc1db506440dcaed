"""What a stack refuses, and that the message names the key, who set it, and what was probably meant."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from dgc_training.config import Config, ConfigError, load, to_yaml
from dgc_training.config.tree import copied

CNN, WM5, WM5O = "configs/digits/cnn.py", "configs/dgc/wm5.py", "configs/dgc/wm5o.py"
DGC = "configs/dgc/__init__.py"
ROUTE, RANK2, QSGD = "configs/route/matrices_only.py", "configs/powersgd/rank2.py", "configs/quant/qsgd.py"
UNKNOWN = [
    ("train.num_epoch 5", "unknown key train.num_epoch; closest: train.num_epochs"),
    ("trian.num_epochs 5", "unknown key trian; closest: train"),
    ("num_epochs 5", "closest: train.num_epochs"),
    ("train.optimizer.momentun 0", "SGD takes no keyword 'momentun'; closest: train.optimizer.momentum"),
    ("train.meters.acc/{}_top1.kk 5", "dgc_training.meters.TopKClassMeter takes no keyword 'kk'"),
    ("train.meters.acc/{}_top9.k 5", "it must be a node that names its constructor (_target_)"),
    ("model.zzzzzzzzzzzz 5", "takes no keyword 'zzzzzzzzzzzz'; there are: model.num_classes"),
    ("train.scheduler.T_max.x 5", "train.scheduler.T_max is {'x': 5}, but it must be a whole number"),
    ("train.compression.memory.momentum 0.5", "dgc.compression.DenseCompressor takes no keyword 'memory'"),
    ("train.compression.compress_ratio 1", "or configs/dgc/... or"),
    ("train null", "be a mapping"),
]
FAILING_PYTHON = [
    ("def f():\n    raise OSError('gone')\nf()", "line 4: OSError: gone"),
    ("x = (", "line 3: SyntaxError: '(' was never closed"),
    ("raise SystemExit(3)", "line 3: SystemExit: 3"),
    ("configs.model = torch.nn.Linear", "line 3: ValueError: model is <class 'torch.nn.modules.linear.Linear'>"),
    ("configs.model = Config(lambda: 1)", "cannot be imported by that path"),
    ("class Net: pass\nconfigs.model = Config(Net)", "define it at the top of a module of its own"),
    ("configs.seed = torch.zeros(1)", "seed is tensor([0.]), but it must be null, bool, int, float, str, list"),
    ("configs.train.scheduler.milestones = [1]\nconfigs.train.scheduler.milestones.append({1})", "milestones is"),
    ("configs.train.items = 3", "'items' is also a method"),
    ("configs.x = configs", "mine.py: "),
    ("configs.seed = derived('1//0')", 'seed is ${derive:"1//0"}: integer division or modulo by zero'),
    ("configs.seed = derived('f(x)')", "'f(x)' is not made of keys"),
    ("configs.train.scheduler.T_max -= 1", "line 3: TypeError"),
]
FAILING_YAML = [
    ("seed: 1\ntrain: [1", "line 2, column 8"),
    ("seed: 1\nseed: 2", "found duplicate key seed"),
    ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ("1: 2", "a config key must be a non-empty string, not 1"),
    ("- 1", "a mapping of keys, not a list"),
    ("seed: ${oops", "${oops"),
]


def message_of(*stack: str | Path, words: str | Sequence[str] = "") -> str:
    with pytest.raises(ConfigError) as caught:
        load(list(stack), words.split() if isinstance(words, str) else words)
    return str(caught.value)


def refusal(*stack: str | Path, words: str | Sequence[str] = "") -> str:
    """The message with which a stack and its overrides are refused: one line."""
    message = message_of(*stack, words=words)
    assert "\n" not in message
    return message


def refusals(*stack: str | Path, words: str = "") -> list[str]:
    """The lines with which a stack that has several errors is refused, after their number."""
    first, *lines = message_of(*stack, words=words).splitlines()
    assert first == f"{len(lines)} errors in the config:"
    return [line.removeprefix("  ") for line in lines]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """A file beside which the stack is loaded; its name in messages is its name alone."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine.yaml"


def yaml(file: Path, text: str) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


def python(file: Path, text: str) -> Path:
    head = "import torch\nfrom dgc_training.config import Config, configs, derived\n"
    return yaml(file.with_suffix(".py"), head + text)


def test_what_a_method_needs_does_not_change_silently(file: Path) -> None:
    message = refusal(WM5, CNN, "configs/dgc/fp16.py")
    assert "train.optimizer._target_ is torch.optim.SGD (configs/digits/__init__.py)" in message
    assert f"{DGC} needs dgc.optim.DGCSGD" in message
    right = f"--configs {CNN} {WM5} configs/dgc/fp16.py"
    assert message.endswith(right)
    load(right.split()[1:])
    yaml(file, "train: {optimizer: {_target_: torch.optim.SGD, lr: 0.1}}")
    saved = yaml(file.with_name("config.yaml"), to_yaml(load([CNN, WM5])))
    for name in (file, python(file, "configs.train.optimizer = Config(torch.optim.SGD, lr=0.1)")):
        message = refusal(CNN, WM5, name)
        assert f"torch.optim.SGD ({name.name})" in message
        assert f"--configs {CNN} {name.name} {WM5}" in message
        assert "config.yaml needs dgc.optim.DGCSGD" in refusal(saved, name)
    message = refusal(CNN, python(file, "configs.train.optimizer = Config(torch.optim.Adam)"), WM5)
    assert message.startswith(f"{DGC}, line ") and "torch.optim.Adam" in message
    dense = "compression._target_ dgc.compression.DenseCompressor"
    for words in (dense, "dgc false", "compression null", "optimizer null", "optimizer 5"):
        message = refusal(CNN, WM5, words=f"--configs.train.{words}")
        assert f"(command line, --configs.train.{words.split()[0]})" in message, words
        assert f"{DGC} needs" in message and "leave out the one or the other" in message, words
    # nor does one method replace another
    for one, other, needs in (
        ("configs/quant/signsgd.py", RANK2, "dgc.compression.PowerSGDCompressor"),
        (QSGD, "configs/sparse/topk.py", "dgc.compression.SparseCompressor"),
        (WM5, "configs/sparse/topk.py", "train.dgc to be False"),
    ):
        message = refusal(CNN, one, other)
        assert needs in message and "leave out the one or the other" in message, (one, other)
        assert other.rpartition("/")[0] in message and one.rpartition("/")[0] in message, (one, other)
    # a route takes the method before it, and no other after it
    tree = load([CNN, RANK2, ROUTE], [])
    assert tree.train.compression.rules[0].compressor._target_ == "dgc.compression.PowerSGDCompressor"
    assert f"{ROUTE} needs dgc.compression.PowerSGDCompressor" in refusal(CNN, RANK2, ROUTE, QSGD)


def test_files_without_those_before_them_say_what_to_stack(file: Path) -> None:
    for stack in (["gossip/ar", "gossip/fp16"], ["gossip/bf16"], ["contrib/choco", "gossip/int8"]):
        message = refusal(CNN, *(f"configs/{name}.py" for name in stack))
        assert "has no `message`: stack sgp, osgp or dpsgd" in message
    message = refusal(CNN, "configs/gossip/machines.py", "configs/topology/ring.py")
    assert "configs/gossip/machines after it" in message
    assert "stack an experiment before configs/muon" in refusal("configs/muon/local.py", "configs/pysource/gpt.py")
    message = refusal(CNN, "configs/selection/laplace.py")
    assert "stack a file of configs/dgc before it" in message and "dgc.compression.DenseCompressor" in message
    lines = refusals(CNN, words="--configs.train.optimizer._target_ torch.optim.Adam")
    for line, keyword in zip(lines, ("momentum", "nesterov"), strict=True):
        assert f"takes no keyword '{keyword}'" in line and "stack a file of configs/adam/... or" in line
    load([CNN], ["--configs.train.optimizer", "{_target_: torch.optim.Adam, lr: 0.001}"])
    yaml(file, "train: {batch_size: 3}")
    for experiment in ([], [WM5], [file], ["configs/digits"]):
        message = refusal(*experiment)
        assert "model" in message and f"{CNN} or configs/digits/resnet20.py" in message
        assert experiment != [file] or ("train.num_epochs" in message and "batch_size" not in message)
    assert refusal(CNN, words="--configs.train.batch_size null").startswith("no train.batch_size")


def test_unknown_keys(file: Path) -> None:
    local = ("configs/local/diloco.py", "configs/local/machines.py")
    inner = "train.compression.memory.momentum"
    rows = [
        *(((), *row) for row in UNKNOWN),
        ((WM5,), "train.compression.momentum 0", f"takes no keyword 'momentum'; closest: {inner}"),
        (local, "train.local.average_every 0", "'average_every'; closest: train.local.base.average_every"),
    ]
    for stack, words, meant in rows:
        message = refusal(CNN, *stack, words=f"--configs.{words}")
        assert message.startswith(f"command line, --configs.{words.split()[0]}: ") and meant in message, words
    # and in files
    meant = "unknown key train.num_epoch; closest: train.num_epochs"
    assert refusal(CNN, yaml(file, "train:\n  num_epoch: 5\n")).startswith(f"mine.yaml: {meant}")
    for text, message in (
        ("configs.train.num_epoch = 5", f": {meant}"),
        ("\nconfigs.trian.num_epochs = 5", ", line 4: AttributeError: no key 'trian' here; closest: train"),
        # declared keys cannot be taken away
        ("configs.data = Config(num_workers=1)", ": removes data.num_threads_per_worker; set keys one by one"),
        ("del configs.data.num_workers", ": removes data.num_workers"),
    ):
        assert refusal(CNN, python(file, text)).startswith(f"mine.py{message}"), text
    lines = refusals(CNN, python(file, "configs.data = Config()\nconfigs.train.pop('trace')"))
    assert len(lines) == 3 and all("mine.py: removes " in line for line in lines)


def test_a_users_own_root_base_declares_keys(tmp_path: Path) -> None:
    yaml(tmp_path / "__init__.yaml", "mine: {depth: 3}")
    deep = yaml(tmp_path / "deep.yaml", "mine: {depth: 4}")
    assert load([CNN, deep], ["--configs.mine.depth", "5"]).mine.depth == 5
    assert "unknown key mine.depht; closest: mine.depth" in refusal(CNN, deep, words="--configs.mine.depht 4")


def test_a_declared_key_has_the_type_of_its_value(tmp_path: Path) -> None:
    yaml(tmp_path / "__init__.yaml", "mine: {depth: 3}")
    message = refusal(CNN, yaml(tmp_path / "deep.yaml", "mine: {depth: 4}"), words="--configs.mine.depth abc")
    assert message.endswith("mine.depth is 'abc', but it must be a whole number")


def test_a_declared_key_may_have_limits(tmp_path: Path) -> None:
    text = "from dgc_training.config import Key\nconfigs.mine = {}\nconfigs.mine.name = Key(str)\n"
    python(tmp_path / "__init__.py", text + "configs.mine.depth = Key(int | None, 3, least=2)\n")
    named = yaml(tmp_path / "named.yaml", "mine: {name: a}")
    assert load([CNN, named], ["--configs.mine.depth", "null"]).mine == {"depth": None, "name": "a"}
    message = refusal(CNN, named, words="--configs.mine.depth 1")
    assert message.endswith("mine.depth is 1, but it must be a whole number, at least 2")
    assert refusal(CNN, tmp_path).startswith("no mine.name in this stack")


NODE, WHOLE = "a node that names its constructor (_target_)", "a whole number, at least 1"
WRONG_WORDS: dict[str, tuple[list[str], str]] = {
    "train.num_epochs": (["abc", "1.5", "0", "true", "[1]", '${derive:"1/2"}'], WHOLE),
    "train.num_batches_per_step": (["null", "-1"], WHOLE),
    "train.checkpoint_every": (["0.5", "abc"], WHOLE),
    "train.bucket_mb": (["0"], "a number, at least 0.001"),
    "data.num_workers": (["-1"], "a whole number, at least 0"),
    "train.scheduler.T_max": (["abc"], "a whole"),
    "train.optimizer.lr": (["fast", "nan"], "a number"),
    "train.metric": (["5", "{a: 1}"], "text"),
    "deterministic": (["1", "null"], "true or false"),
    "train.criterion": (["5", "null"], NODE),
    "dataset": (["5"], NODE),
    "train.criterion._partial_": (["3"], "true or false"),
    "train.compression.warmup_coeff": (["abc"], "a number or a list"),
}


@pytest.mark.parametrize(
    ("key", "value", "kind"), [(key, value, kind) for key, (found, kind) in WRONG_WORDS.items() for value in found]
)
def test_a_value_of_the_command_line_of_a_wrong_type_is_named(key: str, value: str, kind: str) -> None:
    message = refusal(CNN, WM5O, words=[f"--configs.{key}", value])
    assert message.startswith(f"command line, --configs.{key}: {key} is")
    assert f"but it must be {kind}" in message


def test_the_last_of_two_overrides_is_checked() -> None:
    words = "--configs.train.optimizer.lr null --configs.train.optimizer.lr abc"
    assert "train.optimizer.lr is 'abc'" in refusal(CNN, words=words)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("train: {optimizer: {nesterov: 1}}", "train.optimizer.nesterov is 1, but it must be true or false"),
        # T_max follows from it, and is not reported again
        (
            "train: {num_epochs: '${train.metric}'}",
            "train.num_epochs is ${train.metric}, which gives 'acc/test_top1'",
        ),
        ("train: {checkpoint_every: {a: 1}}", "train.checkpoint_every is {'a': 1}, but it must be a whole number"),
        ("train: {gossip: {a: 1}}", f"train.gossip is {{'a': 1}}, but it must be {NODE}"),
        ("train: {meters: {m: 5}}", f"train.meters.m is 5, but it must be {NODE}"),
        ("train: {meters: {m: null}}", f"train.meters.m is None, but it must be {NODE}"),
        ("seed: ???", "seed is ???: Missing mandatory value: seed"),
        *((f"requires: {value}\n", "requires is ") for value in ("${x}", "5", "[1, 2]", "abc")),
    ],
)
def test_a_value_of_a_file_of_a_wrong_type_is_named(file: Path, text: str, wrong: str) -> None:
    assert f"mine.yaml: {wrong}" in refusal(CNN, yaml(file, text))


def test_targets_that_cannot_be_imported(file: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(file.parent))
    yaml(file.with_name("broken.py"), "raise RuntimeError('no licence')")
    for name in ("needy.py", "package/__init__.py", "package/needy.py"):
        yaml(file.with_name("package").parent / name, "" if "__" in name else "import not_there")
    failed = "failed: ModuleNotFoundError: No module named 'not_there'"
    for target, reason in (
        ("dgc_models.DigitsCNNN", "dgc_models has no 'DigitsCNNN'; closest: DigitsCNN"),
        ("dgc_modells.DigitsCNN", "there is no module 'dgc_modells' on Python's path; closest: dgc_models"),
        ("torch.nnn.Linear", "torch has no 'nnn'; closest: nn"),
        ("DigitsCNN", "is no import path such as torch.optim.SGD"),
        ("torch.pi", "torch.pi cannot be called"),
        ("torch.optim.SGD.x", "torch.optim.SGD has no 'x'"),
        ("broken.Model", "importing broken failed: RuntimeError: no licence"),
        *((f"{name}.Model", f"importing {name} {failed}") for name in ("needy", "package.needy")),
    ):
        message = refusal(CNN, yaml(file, f"model: {{_target_: {target}}}"))
        assert message.startswith(f"mine.yaml: model._target_ is {target}: ") and reason in message, message


def test_formulas_without_a_value(file: Path) -> None:
    key, absent = "train.scheduler.T_max", "there is no key 'train.num_epoch'; closest: train.num_epochs"
    derivations = {
        "train.num_epoch": absent,
        key: "it refers back to itself",
        "__import__": "there is no key '__import__'",
        "train.metric+1": "train.metric is 'acc/test_top1', not a number",
        "1/0": "division by zero",
        "9**9**9": "math range error",
        "(0-2)**0.5": "math domain error",
    }
    for formula, reason in (
        *((f'${{derive:"{text}"}}', reason) for text, reason in derivations.items()),
        ("${train.num_epoch}", absent),
        (f"${{{key}}}", "it refers back to itself"),
        ("${nosuch:3}", "nosuch"),
        ("${oops", "${oops"),
    ):
        message = refusal(CNN, words=f"--configs.{key} {formula}")
        assert message.startswith(f"command line, --configs.{key}: {key} is") and reason in message, message
    message = refusal(CNN, yaml(file, "seed: ${train.timeout}\ntrain: {timeout: '${derive:\"seed + 1\"}'}"))
    assert message.startswith("mine.yaml: seed is ${train.timeout}: it refers back to itself")


def test_files_that_fail_are_not_there_or_not_clear(file: Path) -> None:
    for write, rows in ((python, FAILING_PYTHON), (yaml, FAILING_YAML)):
        for text, reason in rows:
            path = write(file, text)
            message = refusal(CNN, path)
            assert message.startswith(path.name) and reason in message, message
    assert f"no config file configs/digits/cn.py; closest: {CNN}" in refusal("configs/digits/cn.py")
    yaml(file.with_name("notes.txt"), "")
    assert refusal("notes.txt").startswith("there is no config file notes.txt")
    yaml(file, "")
    python(file, "")
    assert refusal(CNN, "mine") == "mine may mean mine.py or mine.yaml; write which, or keep one"
    yaml(file.parent / "folder/x.yaml", "")
    assert refusal("folder") == "there is no config file folder; closest: folder/x.yaml"
    for suffix in ("py", "yaml"):
        yaml(file.parent / f"folder/__init__.{suffix}", "")
    assert "folder/__init__ may mean folder/__init__.py or folder/__init__.yaml" in refusal("folder/x.yaml")
    assert "folder may mean folder/__init__.py or folder/__init__.yaml; write which" in refusal("folder")


@pytest.mark.parametrize(
    ("write", "text"),
    [
        ("yaml", "train: {recorder: " + 800 * "{a: " + "1" + 800 * "}" + "}"),
        ("yaml", "train: {recorder: " + 800 * "[" + "1" + 800 * "]" + "}"),
        ("yaml", "train: {recorder: " + 41 * "[" + "1" + 41 * "]" + "}"),
        ("yaml", "".join(f"{level * ' '}a:\n" for level in range(800)) + 800 * " " + "a: 1"),
        ("python", "node = Config(a=1)\nfor _ in range(900):\n    node = Config(a=node)\nconfigs.x = node"),
        ("python", "node = Config(a=1)\nnode.b = node\nconfigs.x = node"),
        ("python", "items = [1]\nitems.append(items)\nconfigs.x = items"),
    ],
    ids=["mappings", "lists", "just too deep", "a block", "nodes", "a node in itself", "a list in itself"],
)
def test_a_tree_that_is_too_deep_or_contains_itself_is_one_error(write: str, text: str, file: Path) -> None:
    path = {"yaml": yaml, "python": python}[write](file, text)
    message = refusal(CNN, path)
    assert message.startswith(path.name) and "nested" in message and len(message) < 200


def test_words_that_are_nested_too_deeply_are_one_error() -> None:
    for words in (
        ["--configs." + ".".join("a" * 500), "1"],
        ["--configs.seed", 500 * "${" + "a" + 500 * "}"],
        ["--configs.train.meters", 500 * "[" + 500 * "]"],
    ):
        assert words[0] in refusal(CNN, words=words)


def test_all_that_is_wrong_is_reported_together(file: Path) -> None:
    yaml(file, "train: {num_epoch: 5, optimizer: {nesterov: 1, momentun: 0.5}, batch_size: 9}\ntrian: {a: 1}")
    wrong = {"train.batch_sise": "3", "train.metric": "5", "seed": "-1", "train.timeout": "null", "seed.x": "1"}
    wrong |= {"train.scheduler.T_max": "${train.num_batches}", "model.num_class": "3"}
    lines = refusals(CNN, file, words=" ".join(f"--configs.{key} {value}" for key, value in wrong.items()))
    for beginning in (
        "mine.yaml: unknown key trian; closest: train",
        "mine.yaml: train.optimizer.nesterov is 1, but it must be true or false",
        "mine.yaml: unknown key train.num_epoch; closest",
        "mine.yaml: train.optimizer.momentun: torch.optim.SGD takes no k",
        "command line, --configs.train.batch_sise: unknown key train.batch_sise; closest: train.batch_size",
        "command line, --configs.train.metric: train.metric is 5, but it must be text",
        "command line, --configs.seed.x: seed is {'x': 1}, but it must be",
        "command line, --configs.train.timeout: train.timeout is None, but it must be",
        "command line, --configs.train.scheduler.T_max: train.scheduler.T_max is ${train.num_batches}: there is",
        "command line, --configs.model.num_class: model.num_class: dgc_models.DigitsCNN takes no keyword",
    ):
        assert sum(line.startswith(beginning) for line in lines) == 1, (beginning, lines)
    assert len(lines) == 10


def test_nothing_is_checked_after_a_file_that_fails(file: Path) -> None:
    yaml(file, "train: {num_epoch: 5}")
    fails = python(file, "raise OSError('gone')")
    assert refusal(CNN, file, fails, words="--configs.sed 3") == "mine.py, line 3: OSError: gone"


def test_all_files_that_are_missing_are_reported_together() -> None:
    assert len(refusals("configs/digits/cn.py", "nosuch.yaml")) == 2


def test_a_key_without_the_prefix_is_shown_with_it() -> None:
    num_epochs = ["--train.num_epochs 5", "--train.num_epochs=5", "--configs.seed 3 train.num_epochs=5"]
    num_epochs += ["--configs.seed 3 configs.train.num_epochs=5", "--num_epochs 5", "--train.num_epoch 5"]
    for word in (*num_epochs, "--optimizer.lr -1", "--seed"):
        meant = {"--optimizer.lr -1": "train.optimizer.lr", "--seed": "seed"}.get(word, "train.num_epochs")
        assert f"on the command line; closest: --configs.{meant}" in refusal(CNN, words=word), word
    # After --configs FILE, argparse takes such a word for another file.
    message = refusal(CNN, "train.num_epochs=5")
    assert message.startswith("there is no config file train.num_epochs=5; closest: --configs.train.num_epochs")
    lines = refusals(CNN, words="--train.num_epochs 5 --seed=3 --evalute --configs.sed 4")
    assert len(lines) == 4 and "unexpected '--evalute' on the command line; closest: --evaluate" in lines


def test_the_first_value_of_a_keyword_has_the_type_of_its_annotation(file: Path, monkeypatch: MonkeyPatch) -> None:
    head = "from dgc.compression import DGCCompressor\nconfigs.train.compression = Config(DGCCompressor, "
    for keyword, value, kind in (
        ("warmup_epochs", "'five'", "a whole number"),
        ("warmup_epochs", "2.5", "a whole number"),
        ("fp16_values", "'yes'", "true or false"),
        ("warmup_coeff", "'x'", "a number or a list"),
    ):
        wrong = f"mine.py: train.compression.{keyword} is {value}, but it must be {kind}"
        assert refusal(CNN, python(file, f"{head}{keyword}={value})")) == wrong
    message = refusal(CNN, python(file, f"{head}warmup_coeff=[1, 'x'])"))
    assert message == "mine.py: train.compression.warmup_coeff.1 is 'x', but it must be a number"
    for lr, shown in (("fast", "'fast'"), ("'${train.metric}'", "${train.metric}, which gives 'acc/test_top1'")):
        yaml(file, f"train: {{optimizer: {{_target_: torch.optim.Adam, lr: {lr}}}}}")
        assert refusal(CNN, file) == f"mine.yaml: train.optimizer.lr is {shown}, but it must be a number"
    # An annotation that no config value fits, as Tensor, accepts everything.
    yaml(file, "train: {criterion: {_target_: torch.nn.CrossEntropyLoss, weight: [1, 2]}}")
    assert load([CNN, file]).train.criterion.weight == [1, 2]
    optimizer = "{_target_: torch.optim.Adam, lr: 1, betas: [0, 0.9], foreach: null, eps: '${seed}'}"
    yaml(file, f"train: {{optimizer: {optimizer}}}")
    assert load([CNN, file]).train.optimizer.betas == [0, 0.9]
    # without an annotation the default decides
    monkeypatch.syspath_prepend(str(file.parent))
    signature = "is_open=True, size=0, rate=0.5, mode='mean', first=None, rest=()"
    yaml(file.with_name("unannotated.py"), f"def criterion({signature}):\n    return size\n")
    number = "a whole number or a number"
    kinds = {"is_open: 1": "true or false", "size: big": number, "rate: [1]": "a number", "mode: 3": "text"}
    for keyword, kind in kinds.items():
        yaml(file, f"train: {{criterion: {{_target_: unannotated.criterion, {keyword}}}}}")
        assert f"but it must be {kind}" in refusal(CNN, file), keyword
    accepted = "is_open: null, size: 0.5, rate: 1, mode: sum, first: [1], rest: 5"
    yaml(file, f"train: {{criterion: {{_target_: unannotated.criterion, {accepted}}}}}")
    assert load([CNN, file]).train.criterion.size == 0.5


def test_words_that_are_no_overrides() -> None:
    key, scheduler = "--configs.train.compression.warmup_coeff", "--configs.train.scheduler"
    for words, reason in (
        (["--configs.seed="], "--configs.seed has no value; write null for none"),
        *((["--configs.seed", *rest], "has no value") for rest in ([], [" "], ["--configs.train.dgc", "true"])),
        (["--config.seed", "3"], "unexpected '--config.seed' on the command line; closest: --configs.seed"),
        (["--configs.", "3"], "unexpected '--configs.'"),
        (["--configs.seed", "3", WM5], f"unexpected '{WM5}'"),
        (["--nothing", "3"], "'--nothing' on the command line; overrides are written --configs.KEY VALUE"),
        *((words, "is no list or mapping") for words in ([key, "[1, 2"], ["--configs.seed", "[1, {]"])),
        *(([f"{key}.{index}", "1"], f"there is no '{index}' in a list of 5") for index in "5x"),
        ([f"{scheduler}=null", f"{scheduler}.T_max=3"], "train.scheduler is {'T_max'"),
        (["--configs.a..b", "1"], "a config key must be a non-empty string"),
    ):
        message = message_of(CNN, WM5O, words=words)
        assert reason in message, (words, message)
    # long values are cut
    long = "+".join(["1"] * 2000)
    formulas = (f'${{derive:"{long}+nosuch"}}', f'${{derive:"{long}+f(x)"}}', f"${{{long}")
    for value in (*formulas, "9" * 1000 + "x", f"[{long}, {{]"):
        message = message_of(CNN, words=["--configs.train.scheduler.T_max", value])
        assert ("..." in message or "is no value or formula" in message) and len(message) < 400


def test_config_nodes_are_mappings_with_attributes() -> None:
    node = Config(dict, a=1, b={"c": (1, 2)})
    assert node == {"_target_": "builtins.dict", "a": 1, "b": {"c": [1, 2]}} and node.b.c == [1, 2]
    del node.a
    node["items"] = 3
    assert "a" not in node and list(node.items())[-1] == ("items", 3) and not hasattr(node, "a")
    with pytest.raises(AttributeError, match="no key 'a' here; there are: _target_, b, items"):
        print(node.a)
    # items are the keywords of the constructor
    node = Config("torch.optim.SGD", lr=1.0, _partial_=True)
    assert dict(node.items()) == {"lr": 1.0} and list(node.keys()) == ["lr"] and list(node.values()) == [1.0]
    other = Config("dgc.optim.DGCSGD")
    for key, value in node.items():
        node[f"{key}2"] = other[key] = value
    assert other == {"_target_": "dgc.optim.DGCSGD", "lr": 1.0} and node.lr2 == 1.0
    # the whole node, as dict.update and a copy take it
    other.update(node)
    assert other == copied(node) and other._target_ == "torch.optim.SGD" and copied(node)._partial_ is True
