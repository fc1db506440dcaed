"""After the other files: this run is one of several groups, which meet in outer steps and may come and go.

Start the coordinator first: python -m dgc.groups serve --state FILE. See docs/groups.md.
"""

from dgc.groups import connect
from dgc_training.config import Config, configs

configs.train.groups = Config(connect)
configs.train.groups.address = "127.0.0.1:29444"  # host:port of the coordinator
# keeps the last committed state, on a disk of this machine; null: in memory only
configs.train.groups.folder = None
configs.train.groups.name = ""  # of this group in messages; empty: the name of the machine
configs.train.groups.max_staleness = 3  # rounds that the group may have missed and keep its own progress
# a group counts in a round by its samples or tokens since its last one; all groups need the same value
configs.train.groups.weighted = False
