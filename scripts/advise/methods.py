"""The methods that the advisor compares, each as config files to stack after an experiment.

To add one, add a row: its files set `train.compression`, or a synchronous `train.gossip` or `train.local`. The
advisor loads them, builds the optimizer and records what it sends, so nothing else depends on the method.

docs/methods.md says which optimizer goes with which method. Config files refuse what would be wrong, such as DGC
with Adam. The table below has what only trains badly.
"""

from dataclasses import dataclass


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


ADAM = ("torch.optim.Adam", "torch.optim.AdamW")
HALVES = ("fp16", "bf16")
UNCOMPRESSED = ("dense", *HALVES)  # what a method must be faster than
METHODS = (
    Method("dense"),
    Method("fp16", ("configs/dense/fp16.py",)),
    Method("bf16", ("configs/dense/bf16.py",)),
    Method("dgc", ("configs/dgc/wm5.py",)),
    Method("dgc-fp16-packed", ("configs/dgc/wm5.py", "configs/dgc/fp16.py", "configs/dgc/packed.py")),
    Method("dgc-sign-rice", ("configs/dgc/wm5.py", "configs/dgc/sign.py", "configs/dgc/rice.py")),
    Method(
        "dgc-reduce-scatter",
        (
            "configs/dgc/wm5.py",
            "configs/dgc/fp16.py",
            "configs/dgc/packed.py",
            "configs/dgc/reduce_scatter.py",
        ),
    ),
    Method("powersgd-1", ("configs/powersgd/rank1.py",)),
    Method("powersgd-2", ("configs/powersgd/rank2.py",)),
    Method("powersgd-4", ("configs/powersgd/rank4.py",)),
    Method(
        "2bit",
        ("configs/threshold/adaptive.py",),
        not_with_adam="its updates differ in size from step to step, and Adam divides by that: docs/language.md",
    ),
    Method(
        "sign",
        ("configs/quant/scaled_sign.py",),
        not_with_adam="one scale for a whole tensor replaces the second moments of its elements: docs/methods.md",
    ),
    Method("onebit-adam", ("configs/adam/onebit_adam.py",), for_adam=True),
    Method("dgc-adam", ("configs/adam/dgc_adam.py",), for_adam=True),
    Method("sgp", ("configs/gossip/sgp.py",)),
    Method("sgp-fp16", ("configs/gossip/sgp.py", "configs/gossip/fp16.py")),
)
GOSSIP = ("sgp", "sgp-fp16")  # each rank trains a model of its own
NAMES = tuple(method.name for method in METHODS)


def unfit(method: Method, optimizer: str) -> str | None:
    """Why a method does not go with an experiment's optimizer, by its `_target_`. None: it does."""
    if optimizer in ADAM:
        return f"with {optimizer}, {method.not_with_adam}" if method.not_with_adam else None
    return f"it is for Adam and AdamW, and train.optimizer is {optimizer}" if method.for_adam else None
