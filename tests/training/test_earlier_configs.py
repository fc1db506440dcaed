"""Runs whose config an earlier version has saved, with local steps as train.gossip, are resumed."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import case
from simulated import CNN

from dgc.comm.lockstep import LockstepWorld
from dgc_training.config import ConfigError, load, to_yaml
from dgc_training.earlier import converted
from dgc_training.faults.failure import UsageError
from dgc_training.startup.run_directory import check_run_directory

SGP, DILOCO, ZERO_ONE = "configs/gossip/sgp.py", "configs/local/diloco.py", "configs/adam/zero_one_adam.py"
STACKS = [
    [DILOCO],
    [SGP, "configs/local/slowmo.py"],
    [SGP, "configs/gossip/machines.py", "configs/local/pga.py"],
    [DILOCO, "configs/local/machines.py"],
    ["configs/local/sparseloco.py", "configs/local/ramp.py"],
    [ZERO_ONE],
]


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


def test_names_of_still_earlier_versions() -> None:
    slowmo = {"_target_": "dgc.gossip.SlowMo", "beta": 0.5}
    machines = {"_target_": "dgc.gossip.Machines", "base": {"_target_": "dgc.gossip.SGP"}}
    gossip = {"_target_": "dgc.gossip.Periodic", "average_every": 48, "base": machines, "outer": slowmo}
    derived = {"steps": '${derive:"2 * train.gossip.average_every"}'}
    assert converted({"train": {"gossip": gossip, "scheduler": derived}})["train"] == {
        "gossip": {"_target_": "dgc.gossip.HierarchicalGossip", "base": {"_target_": "dgc.gossip.SGP"}},
        "local": {
            "_target_": "dgc.local.OuterSteps",
            "average_every": 48,
            "base": "${train.gossip}",
            "outer": {"_target_": "dgc.local.SlowMo", "beta": 0.5},
        },
        "scheduler": {"steps": '${derive:"2 * train.local.average_every"}'},
    }


def test_csv_files_are_a_recorder(tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    for stack, csv in (([CNN, SGP], True), ([CNN], False)):
        tree = load(stack)
        content = yaml.safe_load(to_yaml(tree))
        del content["train"]["recorder"]
        content["train"]["csv"] = csv
        saved.write_text(yaml.safe_dump(content))
        assert load([saved]) == tree and bool(tree.train.recorder) == csv


def test_other_configs_stay() -> None:
    stack: list[str]
    for stack in ([], [SGP], [DILOCO]):
        content = yaml.safe_load(to_yaml(load([CNN, *stack])))
        before = deepcopy(content)
        assert converted(content) == before
        if stack != [DILOCO]:
            del content["train"]["local"]  # a run that was saved before the key
            assert converted(content) == before
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
