"""The tests of each package."""

from typing import NamedTuple


class Tests(NamedTuple):
    own: tuple[str, ...]  # in one process: their lines are recorded
    # they start processes, whose lines are not recorded, and follow for a fault that no recorded test runs
    ranks: tuple[str, ...] = ()


LAWS = ("tests/laws/test_laws.py",)
TRANSPORTS = ("tests/parallel/test_ranks.py", "tests/parallel/test_transports.py")
TRAINER = Tests(("tests/training",), ("tests/training/test_failure.py",))
TRAINER_PACKAGES = (
    "atomic_write checkpoint config config_files constructors data errors evaluation faults formulas "
    "launcher logging meters random_state schedule startup stepping synchronization tasks"
)
ADVISOR = Tests(("tests/advisor",))
PACKAGES = {
    "dgc/advise": ADVISOR,
    "dgc/advisor": ADVISOR,
    "dgc/aggregate": Tests(("tests/lowrank/test_powersgd.py", "tests/optim/test_identity.py")),
    "dgc/codes": Tests(("tests/codes", *LAWS), TRANSPORTS),
    "dgc/comm": Tests(("tests/comm",), (*TRANSPORTS, "tests/parallel/test_hierarchical.py")),
    "dgc/core": Tests(("tests/core", "tests/engine", "tests/sparse", *LAWS), TRANSPORTS),
    "dgc/contrib": Tests(("tests/contrib", "tests/codes", *LAWS)),
    "dgc/doctor": ADVISOR,
    "dgc/ddp": Tests(("tests/ddp", "tests/engine"), ("tests/parallel/test_ddp.py",)),
    "dgc/engine": Tests(("tests/engine", "tests/optim", *LAWS), (*TRANSPORTS, "tests/parallel/test_ddp.py")),
    "dgc/fsdp": Tests(("tests/fsdp",), ("tests/parallel/test_fsdp.py", "tests/parallel/test_fsdp_outer.py")),
    "dgc/gossip": Tests(("tests/gossip",), ("tests/parallel/test_gossip.py", "tests/parallel/test_adpsgd.py")),
    "dgc/integrations": Tests(("tests/integrations",), ("tests/parallel/test_examples.py",)),
    "dgc/kernels": Tests(("tests/kernels",)),
    "dgc/launch": Tests(("tests/test_launch.py",)),
    "dgc/local": Tests(("tests/local",)),
    "dgc/lowrank": Tests(("tests/lowrank", *LAWS), TRANSPORTS),
    "dgc/optim": Tests(("tests/optim",), TRANSPORTS),
    "dgc/paper": Tests(("tests/paper",)),
    "dgc/sparse": Tests(("tests/sparse", *LAWS), TRANSPORTS),
    "dgc/testing": Tests(LAWS),
    "dgc/atomic_write": Tests(("tests/test_atomic_write.py",)),
    "dgc/units": ADVISOR,
    "dgc/versions": Tests(("tests/test_names.py",)),
    **{f"dgc_training/{name}": TRAINER for name in TRAINER_PACKAGES.split()},
}
