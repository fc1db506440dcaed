"""Experiments as stacks of small Python and YAML files, on OmegaConf.

    from dgc_training.config import load, instantiate, to_yaml
    tree = load(["configs/digits/cnn.py", "configs/dgc/wm5.py"], ["--configs.train.num_epochs", "500"])

Files apply from left to right, after the bases (`__init__.py`, `__init__.yaml`) of their folders; the command
line comes last. A Python file starts with `from dgc_training.config import Config, configs, derived`; `configs`
is the tree as this load has built it so far, and no state outlives a load. A YAML file says the same:
`_target_` names a constructor. With `_partial_: true` it is called later, by whoever has the arguments that are
missing.

In YAML and on the command line a mapping is merged into the node it names: keys that it does not name keep their
values. A mapping whose `_target_` is not the node's replaces the node, and so does a mapping after the node was
set to null. In Python an assigned `Config(Target)` always replaces, and `configs.train.optimizer.lr = 0.1` changes
one key.
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
        """`configs` is looked up at each import, so that every load has its own."""
        if name != "configs":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        tree = UNDER_CONSTRUCTION.get()
        if tree is None:
            raise AttributeError(
                "`configs` exists only inside a config file, while dgc_training.config.load reads it"
            )
        return tree
