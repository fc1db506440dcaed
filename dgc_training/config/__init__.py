"""Experiments as stacks of small Python and YAML files, on OmegaConf.

    from dgc_training.config import load, instantiate, to_yaml
    tree = load(["configs/digits/cnn.py", "configs/dgc/wm5.py"], ["--configs.train.num_epochs", "500"])

Files apply from left to right, each after the bases (`__init__.py`, `__init__.yaml`) of its folders, and then the
command line. A Python file changes `configs`, the tree that this load has built so far. In YAML `_target_` names a
constructor, and `_partial_: true` has it called later. There and on the command line a mapping is merged into its
node, unless it has a different `_target_` or the node is null. In Python `Config(Target)` replaces the node.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from dgc_training.config.check import Check
from dgc_training.config.layers import UNDER_CONSTRUCTION, Stack
from dgc_training.config.tree import Config as Config
from dgc_training.config.tree import Key as Key
from dgc_training.config_files import find_config_file
from dgc_training.constructors import instantiate as instantiate
from dgc_training.errors import ConfigError as ConfigError
from dgc_training.errors import collecting, raise_together
from dgc_training.formulas import derived as derived

to_yaml = OmegaConf.to_yaml  # loads as the same tree. resolve=True writes values instead of formulas.

if TYPE_CHECKING:
    configs: Config
else:

    def __getattr__(name: str) -> Config:
        """Looks up `configs` at each import, so that every load uses its own tree."""
        if name == "configs" and (tree := UNDER_CONSTRUCTION.get()) is not None:
            return tree
        raise AttributeError(f"no {name!r} in {__name__}; `configs` exists only while `load` runs")


def load(paths: Sequence[str | os.PathLike[str]], overrides: Sequence[str] = ()) -> DictConfig:
    """Loads config files and command-line overrides as one checked, read-only tree with its formulas.

    Args:
        paths: config files, as `find_config_file` searches them. A folder stands for its base.
        overrides: "--configs.train.num_epochs", "500" or "--configs.train.num_epochs=500".

    Raises:
        ConfigError: with one message for every wrong key or value: the key, the layer that set it, and the closest
            valid names. After a file that cannot be read, nothing else is checked.
    """
    stack, files, problems = Stack(), list[Path](), list[str]()
    for path in paths:
        with collecting(problems):
            files.append(find_config_file(path, stack.words()))
    raise_together(problems)
    for file in files:
        stack.add(file)
    stack.override(overrides, problems)
    check = Check(stack, files)
    raise_together([*check.problems.values(), *problems])
    OmegaConf.set_readonly(check.result, True)
    OmegaConf.set_struct(check.result, True)
    return check.result
