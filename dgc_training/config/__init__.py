"""Experiments as stacks of small Python and YAML files, on OmegaConf.

    from dgc_training.config import load, instantiate, to_yaml
    tree = load(["configs/digits/cnn.py", "configs/dgc/wm5.py"], ["--configs.train.num_epochs", "500"])

Files apply from left to right, each after the bases (`__init__.py`, `__init__.yaml`) of its folders. The command
line applies last. A Python file starts with `from dgc_training.config import Config, configs, derived`. `configs`
is the tree that this load has built so far; no state is kept after a load. A YAML file is equivalent: `_target_`
names a constructor. With `_partial_: true` the constructor is called later, with further arguments.

In YAML and on the command line a mapping is merged into its node: keys that are not in the mapping keep their
values. A mapping with a different `_target_` replaces the node, and so does a mapping after the node was set to
null. In Python an assigned `Config(Target)` always replaces the node, and `configs.train.optimizer.lr = 0.1`
changes one key.
"""

from typing import TYPE_CHECKING

from dgc_training.config.derive import derived as derived
from dgc_training.config.errors import ConfigError as ConfigError
from dgc_training.config.files import UNDER_CONSTRUCTION
from dgc_training.config.stack import defaults as defaults
from dgc_training.config.stack import load as load
from dgc_training.config.stack import to_yaml as to_yaml
from dgc_training.config.targets import instantiate as instantiate
from dgc_training.config.tree import Config as Config

if TYPE_CHECKING:
    configs: Config
else:

    def __getattr__(name: str) -> Config:
        """Looks up `configs` at each import, so that every load uses its own tree."""
        if name != "configs":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        tree = UNDER_CONSTRUCTION.get()
        if tree is None:
            raise AttributeError(
                "`configs` exists only inside a config file, while dgc_training.config.load reads it"
            )
        return tree
