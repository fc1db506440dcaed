"""Names of run directories and comparison of configs."""

from pathlib import Path

import pytest

from dgc_training.startup.agreement import config_differences
from dgc_training.startup.run_directory import move_aside
from dgc_training.startup.run_name import run_name, warn_of_other_run

R20, WM5 = "configs/cifar/resnet20.py", "configs/dgc/wm5.py"
RUN = "runs/[cifar.resnet20+dgc.wm5].e500.np8/config.yaml"
IMAGENET = ["configs/imagenet/resnet50.py", "configs/imagenet/cosine.py", "configs/dgc/wm0.py"]
HALF = ["configs/dgc/fp16.py", "configs/dgc/int32.py"]
NAMES: list[tuple[list[str], str, int | None, str]] = [
    ([R20], "", 8, "cifar.resnet20.np8"),
    ([R20, WM5], "", 8, "[cifar.resnet20+dgc.wm5].np8"),
    ([R20, WM5, *HALF], ".e500", 8, "[cifar.resnet20+dgc.[wm5+fp16+int32]].e500.np8"),
    (IMAGENET, "", 32, "[imagenet.[resnet50+cosine]+dgc.wm0].np32"),
    (["configs/digits/cnn.yaml", "configs/dgc"], "", 1, "[digits.cnn+dgc].np1"),
    ([R20, R20], "", 2, "cifar.resnet20.np2"),
    (["elsewhere/mine.py", WM5], "", 2, "[mine+dgc.wm5].np2"),
    (["configs/cifar/__init__.py"], "", 2, "cifar.np2"),
    (["configs/__init__.py"], "", 2, "configs.np2"),
    ([RUN], "", 4, "[cifar.resnet20+dgc.wm5].e500.repeat.np4"),
    (["/tmp/mine/config.yaml"], "", 4, "mine.repeat.np4"),
    ([R20], "", None, "cifar.resnet20.elastic"),
    (["runs/cifar.resnet20.elastic/config.yaml"], "", None, "cifar.resnet20.repeat.elastic"),
]


def test_names(tmp_path: Path) -> None:
    for configs, suffix, size, name in NAMES:
        assert run_name(configs, suffix, size) == name
    # all spellings of a path give one name
    for path in ("./configs/cifar/resnet20.py", "x/../configs/cifar/resnet20.py", f"{tmp_path}/{R20}"):
        assert run_name([path], size=8, base=tmp_path) == "cifar.resnet20.np8"
    assert run_name(["cifar/resnet20.py"], size=8, base=tmp_path / "configs") == "cifar.resnet20.np8"


def test_an_unfinished_run_on_another_number_of_ranks_is_named(tmp_path: Path) -> None:
    for name in ("a.np2", "a.np3", "a.b.np2", "a.np2.1"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "checkpoints/latest.json").touch()
    (tmp_path / "a.np3/summary.json").touch()
    with pytest.warns(UserWarning) as warned:
        warn_of_other_run(tmp_path / "a.np4", rank=0)
    assert [str(warning.message).rpartition(" ")[2] for warning in warned] == [str(tmp_path / "a.np2")]
    warn_of_other_run(tmp_path / "b.np4", rank=0)


def test_differences_have_the_keys() -> None:
    old = "train: {num_epochs: 3, log_every: 10, betas: [1, 2]}\nseed: 1\nmodel: null\n"
    new = "train: {num_epochs: 4, log_every: 99, betas: [1, 3]}\nmodel: {_target_: m}\nextra: 1\n"
    assert config_differences(old, old) == []
    assert config_differences(old, new) == [
        "  extra: (absent) -> 1",
        "  model: None -> (absent)",
        "  model._target_: (absent) -> 'm'",
        "  seed: 1 -> (absent)",
        "  train.betas: [1, 2] -> [1, 3]",
        "  train.num_epochs: 3 -> 4",
    ]


def test_moving_aside_overwrites_nothing(tmp_path: Path) -> None:
    for content in ("first", "second"):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "file").write_text(content)
        move_aside(tmp_path / "run")
    assert (tmp_path / "run.1" / "file").read_text() == "first"
    assert (tmp_path / "run.2" / "file").read_text() == "second"
    assert not (tmp_path / "run").exists()
