"""The methods that the advisor compares, each as config files to stack after an experiment.

To add one, add a row: its files set `train.compression` or a synchronous `train.gossip`. The advisor loads them,
builds the optimizer and records what it sends, so nothing else depends on the method.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """A row of the advisor's table: the config files of a method."""

    name: str
    files: tuple[str, ...] = ()


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
    Method("2bit", ("configs/threshold/adaptive.py",)),
    Method("sign", ("configs/quant/scaled_sign.py",)),
    Method("sgp", ("configs/gossip/sgp.py",)),
    Method("sgp-fp16", ("configs/gossip/sgp.py", "configs/gossip/fp16.py")),
)
GOSSIP = ("sgp", "sgp-fp16")  # each rank trains a model of its own
NAMES = tuple(method.name for method in METHODS)
