"""The tasks: what is trained, for how long, and what its quality is."""

from collections.abc import Mapping
from dataclasses import dataclass, field

ADAM = "configs/adam/dgc.py"
# DGC corrects the momentum of SGD. With Adam it is error feedback and a ratio warm-up.
WITH_ADAM = {
    "dgc": (ADAM, "--configs.train.compression.compress_ratio=0.001"),
    "dgc-1-percent": (ADAM,),
    "dgc-no-warm-up": (
        ADAM,
        "--configs.train.compression.compress_ratio=0.001",
        "--configs.train.compression.warmup_epochs=0",
    ),
    "dgc-adam": ("configs/adam/dgc_adam.py",),
    "dgc-adam-0.1-percent": ("configs/adam/dgc_adam.py", "--configs.train.compression.compress_ratio=0.001"),
    "onebit-adam": ("configs/adam/onebit_adam.py",),
    "zero-one-adam": ("configs/adam/zero_one_adam.py",),
}
# At the rate of dense training, short runs need a limit of each rank's gradients (section 3.2 of DGC's paper), and
# one epoch of 420 steps that send 1 %.
CLIPPED = (
    "configs/dgc/wm0.py",
    "configs/dgc/int32.py",
    "--configs.train.compression.memory.gradient_clipping._target_=dgc.memory.ClipByNorm",
    "--configs.train.compression.memory.gradient_clipping.max_norm=0.5",
)
WITH_LOCAL_CLIPPING = {
    "dgc": (
        *CLIPPED,
        "--configs.train.compression.warmup_epochs=1",
        "--configs.train.compression.warmup_coeff=[0.01]",
    ),
    "dgc-1-percent": (*CLIPPED, "--configs.train.compression.compress_ratio=0.01"),
    "dgc-no-warm-up": CLIPPED,
}
# The ranks of AD-PSGD have only epochs in common, so it is compared with all-reduce at a rate by epochs.
BY_EPOCH = {name: ("configs/numwords/by_epoch.py", f"configs/gossip/{name}.py") for name in ("ar", "adpsgd")}
# Ratio warm-up counts epochs: an epoch is 25 steps. 1000 steps of 4 ranks read these characters twice.
SHORT = ("--configs.dataset.characters=1000000", "--configs.task.steps_per_epoch=25")


@dataclass(frozen=True)
class Task:
    """One row of the tasks.

    Args:
        words: arguments of train.py: config files, then changes of single keys.
        epochs: of a run, by default.
        batch_size: of a rank, by default: samples, rows or tokens.
        metric: the result that is the quality.
        quality: its name in tables and figures.
        unit: of the quality, in tables.
        also: a second result, in the lines of runs, with its name.
        lower_is_better: whether a lower quality is better.
        varies: the key of the config by which runs differ.
        runs: number of runs of a method, by default.
        decimals: of the quality in tables.
        methods: arguments of the methods that have a form of their own in this task.
    """

    words: tuple[str, ...]
    epochs: int
    batch_size: int
    metric: str = "acc/test_top1"
    quality: str = "accuracy"
    unit: str = " %"
    also: tuple[str, str] | None = None
    lower_is_better: bool = False
    varies: str = "seed"
    runs: int = 3
    decimals: int = 2
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def characters(*words: str, methods: Mapping[str, tuple[str, ...]] | None = None) -> Task:
    """A language model of the characters of Python's sources, trained for 1000 steps."""
    return Task(
        (*words, *SHORT),
        40,
        8,
        metric="bits_per_character/test",
        quality="bits per character",
        unit="",
        lower_is_better=True,
        decimals=4,
        methods=methods or {},
    )


TASKS = {
    "digits": Task(("configs/digits/cnn.py",), 34, 8, varies="dataset.fold", runs=5),
    "digits-resnet20": Task(("configs/digits/resnet20.py",), 34, 8, varies="dataset.fold", runs=5),
    "numwords": Task(
        ("configs/numwords/tiny.py", "configs/numwords/sgd.py"),
        3,
        256,
        metric="translation/test_exact_match",
        quality="exact match",
        also=("translation/test_char_bleu", "character BLEU"),
        methods={**WITH_LOCAL_CLIPPING, **BY_EPOCH},
    ),
    "pysource": characters("configs/pysource/gpt.py", methods=WITH_ADAM),
    "lstm": characters("configs/pysource/lstm.py", methods=WITH_ADAM),
    "lstm-sgd": characters("configs/pysource/lstm.py", "configs/pysource/sgd.py"),
}
