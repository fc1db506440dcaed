"""The methods that the advisor compares, each as config files to stack after an experiment.

To add one, add a row of `scripts.methods` that has files alone: they set `train.compression`, or a synchronous
`train.gossip` or `train.local`. The advisor loads them, builds the optimizer and records what it sends, so nothing
else depends on the method.

docs/methods.md says which optimizer goes with which method. Config files refuse what would be wrong, such as DGC
with Adam. The table below has what only trains badly.
"""

from dataclasses import dataclass

from scripts.methods import files_of


@dataclass(frozen=True)
class Method:
    """A row of the advisor's table.

    Attributes:
        name: Its name.
        files: The config files to stack after an experiment.
        for_adam: Whether it goes with Adam and AdamW only.
        not_with_adam: Why it does not go with them. Empty: it does.
    """

    name: str
    files: tuple[str, ...] = ()
    for_adam: bool = False
    not_with_adam: str = ""


def row(name: str, *, for_adam: bool = False, not_with_adam: str = "") -> Method:
    return Method(name, files_of(name), for_adam, not_with_adam)


ADAM = ("torch.optim.Adam", "torch.optim.AdamW")
HALVES = ("fp16", "bf16")
UNCOMPRESSED = ("dense", *HALVES)  # what a method must be faster than
SIZES = "its updates differ in size from step to step, and Adam divides by that: docs/language.md"
ONE_SCALE = "one scale for a whole tensor replaces the second moments of its elements: docs/methods.md"
METHODS = (
    *map(row, (*UNCOMPRESSED, "dgc-fp32-int64", "dgc-fp16-packed", "dgc-sign-rice", "dgc-reduce-scatter")),
    *map(row, ("powersgd-1", "powersgd-2", "powersgd-4")),
    row("2bit-adaptive", not_with_adam=SIZES),
    row("scaled-sign", not_with_adam=ONE_SCALE),
    row("onebit-adam", for_adam=True),
    row("dgc-adam", for_adam=True),
    *map(row, ("sgp", "sgp-fp16")),
)
GOSSIP = ("sgp", "sgp-fp16")  # each rank trains a model of its own
NAMES = tuple(method.name for method in METHODS)


def unfit(method: Method, optimizer: str) -> str | None:
    """Why a method does not go with an experiment's optimizer, by its `_target_`. None: it does."""
    if optimizer in ADAM:
        return f"with {optimizer}, {method.not_with_adam}" if method.not_with_adam else None
    return f"it is for Adam and AdamW, and train.optimizer is {optimizer}" if method.for_adam else None
