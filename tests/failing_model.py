"""A model that fails in one step on one rank, for runs of train.py."""

from pathlib import Path

MODEL = """
import os, signal, time
from dgc.launch import started_by
from dgc_models import DigitsCNN
STARTED = started_by(os.environ)
class Failing(DigitsCNN):
    steps = 0
    def forward(self, images):
        Failing.steps += self.training
        if Failing.steps == {step} and {rank} in (None, STARTED.rank):
            self.fail_here()
        return super().forward(images)
    def fail_here(self):
        {statement}
"""


def failing_model(directory: Path, step: int, statement: str, rank: int | None = None) -> Path:
    """The config file, beside the model, which must be in PYTHONPATH.

    In training's forward pass of the number `step` the rank, or all ranks, run this statement of Python in the
    method `fail_here`. It may use os, signal and time.
    """
    (directory / "failing.py").write_text(MODEL.format(step=step, rank=rank, statement=statement))
    config = directory / "failing.yaml"
    config.write_text("model: {_target_: failing.Failing}\n")
    return config
